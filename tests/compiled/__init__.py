"""torch.compile under the engine: what is counted, over which combinations, and a table of architectures."""
