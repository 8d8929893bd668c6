"""When units are whole and when gradients are reduced: hooks, and the one order of their collectives."""
