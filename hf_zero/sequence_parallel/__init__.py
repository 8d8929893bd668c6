"""Ulysses sequence parallelism: the ranks of a group hold slices of the same sequences and trade heads for them in attention."""
