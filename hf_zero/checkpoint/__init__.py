"""Checkpoints: saved by every rank, loaded at any number of ranks and any stage.

``engine_checkpoints`` is what an engine calls; ``save`` and ``load`` are the two ways, ``contents`` says what a rank writes.
``state/`` holds what a checkpoint is made of, ``format/`` how it is described, ``files/`` the tensor files, ``commit/`` how a folder
becomes complete on every rank, ``model/`` whole weights without optimizer, ``convert/`` the checkpoints of others.
"""
