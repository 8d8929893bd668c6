"""Plans a run before there is hardware: what it takes, what it sends, how long it takes."""
