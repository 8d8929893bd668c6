"""Divide the experts of mixture-of-experts layers over ranks: tokens are sent to the ranks that hold their experts, and results back.

**Axes.** Adjacent ranks together hold all experts of a layer. ``Topology.expert`` is the axis of these ranks, ``expert_data`` the axis of
the ranks that hold the same experts. Both divide the axis that ZeRO shards over (``comm/axes.py``), so every rank still trains on its own
samples, and the batch arithmetic does not change. With tensor parallelism each position on that axis is a model axis of several ranks.
These ranks hold different experts, the ranks with the same experts are on one data-parallel axis, and each rank sends a part of the tokens
that all of them have (``SharedTokens``, [Note: who sends a token]). ``split_model`` does not split the modules of experts.

**Modules.** ``find`` (finds layers of experts from the model's structure) → ``exchange`` (rows by one all-to-all; its gradient is the
reverse all-to-all) → ``dispatch`` (counts, tokens, results; the weighted sum) → ``stacked`` (experts in one tensor, [Note: rows in the
order of the joined batch]) and ``listed`` (experts in a list, [Note: two runs of a layer]) → ``load`` (measures how tokens spread),
``held`` (layers that were loaded with this rank's experts only, [Note: held experts]; guarded by ``core/units/guards.py`` until there is an
engine), ``adapters`` (LoRA of stacked experts, [Note: adapters of stacked experts]), ``apply``. ``integrations/experts.py`` reads a rank's
experts from a checkpoint ([Note: reading a share]). A parameter of experts is cut along its first dimension and marked like a
tensor-parallel shard (``core/units/marks.py``, ``expert=True``). A listed expert of another rank has parameters without rows. So names,
orders of units and collectives are the same on every rank.

The forward of a stacked layer in transformers looks up its implementation in a table. ``integrations/experts.py`` puts functions into that
table that dispatch tokens for divided modules, and call the former implementation for other modules. A forward that bypasses the table
raises an error.

**Engine.** The engine treats experts specially in five places. ``assembly/units.py`` makes units of experts over ``expert_data`` (stage 3
gathers an expert's shards only from the ranks that hold the same experts). ``assembly/gradients.py`` gives these units a
``GradientExchange`` over the same ranks, with the factors of the mean over *all* data-parallel ranks: a rank's gradient contains the tokens
of its whole expert group, so the sum over the holders is the sum over all ranks. The gradient norm sums over all shards, which are disjoint
over all ranks. At stage 0, where dense units are equal on all ranks, squares are summed over ``expert``, and those of dense units are
divided by the number of its ranks that have equal copies (``grad_norm.ModelAxis.alike``). Checkpoints (``state/training_state.py``,
``Holders``): the holders share the writing of a unit of experts, which is one *part* among ``expert.world`` (among those of all stages, in
a pipeline); the format is that of tensor-parallel shards, and loads on any number of ranks. Whole tensors (``core/optimizer/owners.py``,
``Spread``): the parts of all ranks are sent to one owner, and back.

Shard groups are outside of experts: ``expert`` and ``expert_data`` divide a shard group, and ``expert_data`` has the group's replicas and
joint axis. Units of experts keep no secondary copy in the node and are never quantized (ZeRO++), because few ranks gather them.

**Order of collectives.** All-to-alls run in the order of the forward, like the model's own collectives, on their own process group. Every
rank runs every layer, with tokens or without, so the position of all-to-alls among gathers and reductions is the same on all ranks. ``tie``
makes a rank without tokens take part in backward, and its experts get gradients of zero ([Note: gradients of idle experts]). For the same
reason ``generate`` runs with ``synced_gpus``. Users' page: docs/experts.md.

``deepspeed/moe/`` is DeepSpeed's own layer of experts: ``gate`` (expert and weight of each token) → ``layer`` (experts in a
list that ``find`` finds; its ``ep_size`` is a ``Claim`` about the mesh, [Note: experts of a MoE layer]).
"""
