"""Ulysses sequence parallelism: the ranks of a group hold slices of the same sequences and exchange heads for tokens in attention.

``sequence_parallel/``: the ranks of a group hold slices of the same sequences; the engine's data-parallel axis is all ranks of all
groups, and only the batch arithmetic counts groups. ``heads`` (which heads a rank computes) → ``exchange`` (heads for sequences and back:
one all-to-all each way, its gradient another) → ``layer`` (``DistributedAttention``), ``masks`` ([Note: whole masks]) → ``attention``
(the function that stands in transformers' table); ``token_flow`` (where else tokens meet, [Note: token flow]), ``joining``,
``sequence_functions``, ``cut_layers`` ([Note: cut layers]), ``whole_inputs`` (models whose layers are cut), ``images``
([Note: images over ranks]) → ``positions`` ([Note: own positions], [Note: frequencies of the longest]),
``sliceable`` (which models can), ``randomness`` ([Note: dropout over slices]) → ``forward`` (hooks around a model: when it sees slices,
[Note: forward of a backward]) → ``state`` (the groups, as ``mpu``); ``batches`` cuts what loaders give. ``attention`` and
``integrations/ulysses.py`` register them with transformers.
Context parallelism: ``joining`` ([Note: head and tail]) → ``gathered`` (``allgather``) and ``ring`` (``alltoall``), both over ``blocks``
([Note: partial attention]) → ``masks`` ([Note: own rows]), ``joining`` (losses and outputs of whole sequences), ``sliceable`` (which
models can) → ``context_forward`` ([Note: whole batches]) → ``state``; ``integrations/context.py`` is accelerate's and Trainer's side.
Their groups are an axis of ``comm/topology.py`` ([Note: cpu:gloo]). docs/sequence-parallel.md is the users' page.
"""
