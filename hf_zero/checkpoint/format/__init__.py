"""Description of a checkpoint: names, records and values of its index, and their checks."""
