"""How a checkpoint is described: names, records and values of its index, and what is checked of them."""
