"""Benchmarks: `lingpt bench` and `bench forms` (`kernels`), `bench train`, `context`, `decode` and `data`."""
