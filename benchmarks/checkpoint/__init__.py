"""Benchmarks of saving and loading checkpoints."""
