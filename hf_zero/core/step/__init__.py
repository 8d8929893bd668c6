"""From a backward to new weights: accumulation, norm, loss scale, update."""
