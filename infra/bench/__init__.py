"""Benchmarks: `make bench` runs them side by side. No test depends on what they say; ratios within one run count."""
