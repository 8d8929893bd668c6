"""1-bit Adam: what it changes in the optimizer and in the step."""
