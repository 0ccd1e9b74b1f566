"""Benchmarks. Scripts run from the root of the checkout: python -m bench.kernels.lean_attention. All figures: bench.figures."""
