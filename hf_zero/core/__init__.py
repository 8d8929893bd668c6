"""The engine: parameters, gradients and optimizer state sharded over ranks. Speaks torch and nothing else."""
