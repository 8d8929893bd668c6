"""State of an engine that a checkpoint holds, and the optimizer state on its way to files and back."""
