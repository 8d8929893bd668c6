"""Tensor parallelism: find out how any model can be split over the ranks of a group, and split it.

``make_plan`` finds a plan from the model's own code, ``TpPlan`` holds it, ``apply_plan`` splits the model. The engine does all three
for ``"tensor_parallel": {"autotp_size": N}``.

``tensor_parallel/`` cuts parameters before units are made; the engine then works over the data-parallel axis and uses the model axis only
for the norm, the random state and saving. ``skeleton`` (a copy without values, patched forwards included) → ``trace`` → ``graph``,
``symbolic_dims``, ``rule``, ``product_rules``, ``rules`` (which dimensions are the same) → ``solve`` (dims that can be split, and the
collectives that gradients need) → ``tracked_ints``, ``dry_run`` (attributes to change, and a check that shapes fit) → ``local_split``
(layers split by themselves) → ``infer`` (repeats all these steps until they agree) → ``overrides`` (plans given by the user, by the model,
or by names of layers) → ``planner`` → ``plan``. With a plan: ``apply``, ``functions``, ``logits`` (the loss from parts of the vocabulary);
``split`` makes and applies a plan for an engine, and recognizes layers that a script has divided itself; ``same_data`` compares the inputs
of the ranks of a group. [Note: how a plan is found] lists the steps. A parameter that is a part is marked (``core/units/marks.py``);
checkpoints and saving read the mark. Reads outside of the layer get the whole parameter ([Note: whole reads]; the guards are in
``core/schedule/outside_reads.py``, at every stage). ``integrations/metrics.py`` lets accelerate's metrics count each sample once.
"""

from __future__ import annotations
