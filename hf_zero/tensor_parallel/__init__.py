"""Split any model over the ranks of a tensor-parallel group.

``make_plan`` finds a plan from the model's own code, ``TpPlan`` holds it, ``apply_plan`` splits the model. The engine does all three
for ``"tensor_parallel": {"autotp_size": N}``.

[Note: how a plan is found]

1. ``trace``: the model runs once on the meta device; each operation records how dimensions of its tensors relate ([Note: symbolic dims]).
2. ``solve``: dims that no operation needs complete are split. Read forward, the trace tells which tensors are then split, whole or partial
   ([Note: states]); read backward, it tells where gradients are summed. A choice without a consistent reading is dropped, with the reason.
3. ``dry_run``: one rank's part runs without values; operations and shapes must agree. Integers of the model's code that mean a split dim
   (``tracked_ints``) are set to the rank's part.
4. Large linear layers that no split dim passes are split on their own, with one more collective each; so are embedding and head.
5. ``apply``: parameters are cut in place, and collectives are hooks on modules, which keep their classes and names.

A model whose code reads values runs once more with tokens: results that depend on no parameter are then computed.
"""

from __future__ import annotations
