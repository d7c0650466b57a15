"""Benchmarks of whole models: a training step (`lingpt bench train`), decoding (`lingpt bench decode`)."""
