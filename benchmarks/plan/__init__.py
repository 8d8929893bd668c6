"""Benchmarks that compare the predictions of `hf-zero plan` with runs."""
