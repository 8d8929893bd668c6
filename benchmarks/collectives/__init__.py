"""Benchmarks of communication: bytes, messages, slow links, large worlds, compressed gradients."""
