"""Collect the state of an engine that a checkpoint holds, and convert optimizer state to tensors of files and back."""
