"""Comparisons that train the scripts of examples/ under DDP and the stages of ZeRO."""
