"""Evaluation: lm-eval's benchmarks on our checkpoints, and the paper's Table 2 next to them."""
