"""Expert parallelism: ranks hold different experts of a mixture, and tokens travel to their experts and back.

``expert_parallel/``: adjacent ranks hold all experts of a mixture between them, and tokens travel. ``Topology.expert`` is those ranks,
``expert_data`` the ones that hold the same experts; both divide the axis that ZeRO shards over (``comm/axes.py``), so every rank still
trains on samples of its own and no batch arithmetic changes. With tensor parallelism a neighbour on that axis stands for its model axis:
the ranks of one hold different experts, those with the same experts are on one data-parallel axis, and each sends a part of the tokens
that all of them have (``shared_tokens``, [Note: who sends a token]); ``split_model`` keeps the modules of experts whole. ``find`` (layers
of experts, from the structure) → ``exchange`` (rows by one all-to-all, its gradient the reverse one) → ``dispatch`` (counts, tokens,
results; the weighted sum) → ``stacked`` (experts in one tensor, [Note: rows in the order of the joined batch]) and ``listed`` (experts in
a list, [Note: two runs of a layer]) → ``load`` (how tokens spread), ``held`` (layers that were loaded with this rank's experts alone,
[Note: held experts]; guarded until there is an engine, as stages are, by ``core/units/guards.py``), ``kept`` (what a rank keeps of a
parameter), ``adapters`` (LoRA of stacked experts, [Note: adapters of stacked experts]), ``apply``. What is read of a checkpoint is
``integrations/experts.py``'s ([Note: reading a share]). A parameter of experts is cut along its first dimension and marked as a
tensor-parallel shard is (``core/units/tp_shard.py``, ``expert=True``); a listed expert of another rank is a parameter with no rows. So
names, orders of units and collectives are the same on every rank.

Stacked layers are found by their transformers' forward, which looks its implementation up: ``integrations/experts.py`` puts
functions into that table that dispatch for marked modules and call what was there for all others. A forward that did not come through it
is an error.

The engine knows of experts in five places. ``assembly/units.py`` makes units of them over ``expert_data`` (stage 3 gathers an expert's
shard from the ranks that hold the same ones, not from all). ``assembly/gradients.py`` gives those units a ``GradientExchange`` over the
same ranks, with the factors of the mean over *all* data-parallel ranks: a rank's gradient holds the tokens of its whole group, so the sum
over the holders is the sum over all. The norm adds up all shards, which are disjoint over all ranks; at stage 0, where dense units are
alike everywhere, all squares are summed over ``expert``, those of dense units divided by how many ranks of it have them alike
(``grad_norm.ModelAxis.alike``). Checkpoints (``state/training_state.py``, ``Holders``): a unit of experts is shared out by its holders and
is one *part* among ``expert.world`` (of those of all stages, in a pipeline); the format is that of tensor-parallel shards, and loads on any
number. Whole tensors (``core/optimizer/owners.py``, ``Spread``): the parts of all ranks go to one owner, and back.

Shard groups are outside: ``expert`` and ``expert_data`` divide a group, and ``expert_data`` has the replicas and the joint axis that the
group has. Units of experts keep no copy in the node and are never coded (ZeRO++): few ranks gather them.

All-to-alls stand in the script's order, like collectives of the model's own, on a group of their own: every rank runs every layer, with
tokens or without (``tie`` keeps a rank without tokens in backward, and its experts give gradients of zero, [Note: gradients of idle
experts]), so their place among gathers and reductions is the same everywhere. For the same reason ``generate`` runs with ``synced_gpus``.
Users' page: docs/experts.md.

``deepspeed/moe/`` is DeepSpeed's own layer of experts: ``routes`` (who goes where, with what weight) → ``gate`` → ``layer`` (experts in a
list that ``find`` finds; its ``ep_size`` is a ``Claim`` of the mesh, [Note: experts of a MoE layer]) → ``params``.
"""
