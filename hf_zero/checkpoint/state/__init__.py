"""What a checkpoint is made of: the parts of an engine, and the optimizer state on its way to files and back."""
