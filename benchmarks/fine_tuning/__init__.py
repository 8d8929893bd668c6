"""Benchmarks of fine-tuning: quantized bases, large vocabularies, generation, weights for an inference engine."""
