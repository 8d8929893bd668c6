"""Describe a checkpoint: the names, records and values of its index, and checks of them."""
