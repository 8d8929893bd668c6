"""Whole weights of a sharded model: a state dict on one rank, or safetensors files as Hugging Face reads them."""
