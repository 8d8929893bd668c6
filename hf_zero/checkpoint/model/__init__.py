"""Gather the unsharded weights of a model: as a state dict on one rank, or as safetensors files in Hugging Face's layout."""
