"""Benchmarks: lm-eval's stock tasks, reading `EVAL_DATA` files instead of the hub if they are given."""
