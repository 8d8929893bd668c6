"""Benchmarks of the time and memory of a training step, against DDP, FSDP2 and DeepSpeed."""
