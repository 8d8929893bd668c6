"""Tensor parallelism: how to split any model over the ranks of a group, and doing so.

``make_plan`` finds a plan from the model's own code, ``TpPlan`` holds it, ``apply_plan`` splits the model. The engine does all three
for ``"tensor_parallel": {"autotp_size": N}``.
"""

from __future__ import annotations
