"""How a checkpoint becomes complete or is not there at all: one outcome for all ranks, staging folders, names, background, nodes."""
