"""Tensor parallelism: how to split any model over the ranks of a group, and doing so.

``make_plan`` finds a plan from the model's own code, ``TpPlan`` holds it, ``apply_plan`` splits the model. The engine does all three
for ``"tensor_parallel": {"autotp_size": N}``.

``tensor_parallel/`` cuts parameters before units are made; the engine then works over the data-parallel axis and knows of the model axis
only the norm, the random state and saving. ``skeleton`` (a copy without values, patched forwards included) → ``trace`` → ``graph``,
``symbolic_dims``, ``rule``, ``product_rules``, ``rules`` (which dimensions are the same) → ``solve`` (what can be split, and what its
gradients need) → ``tracked_ints``, ``dry_run`` (what the code must be told, and proof that shapes fit) → ``local_split`` (layers split by
themselves) → ``infer`` (all of it, until they agree) → ``overrides`` (plans that are given: by the user, by the model, by names of
layers), ``own_layers`` (layers that a script has divided itself) → ``plan_writer``, ``planner`` → ``plan``; with a plan: ``apply``,
``boundary_collectives``, ``functions``, ``logits`` (the loss from parts of the vocabulary); ``split`` does both for an engine, and
``same_data`` compares what the ranks of a group are given; ``call_arguments`` serves both. [Note: how a plan is found] has the order. A
parameter that is a part is marked (``core/units/tp_shard.py``); checkpoints and saving read the mark. Reads outside of the layer get the
whole of it ([Note: whole reads]; the guards are those of ``core/schedule/outside_reads.py``, at every stage).
``integrations/metrics_once.py`` lets accelerate's metrics count each sample once.
"""

from __future__ import annotations
