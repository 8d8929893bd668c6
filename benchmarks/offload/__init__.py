"""Benchmarks of offload to host memory and disk, and of the host's Adam."""
