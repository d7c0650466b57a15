"""Benchmarks: lm-eval's stock tasks, with `EVAL_DATA` files in the hub's place where they are given."""
