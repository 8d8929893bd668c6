"""Implement DeepSpeed's own layer of experts: a gate with capacities, over experts that expert parallelism divides."""
