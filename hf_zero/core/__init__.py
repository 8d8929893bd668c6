"""Run the engine: parameters, gradients and optimizer state sharded over ranks. This package imports torch and no other library."""
