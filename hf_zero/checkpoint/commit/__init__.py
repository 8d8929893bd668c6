"""Completion of a checkpoint, which exists as a whole or not at all: one outcome for all ranks, staging folders, names, background,
nodes.
"""
