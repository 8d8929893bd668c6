"""Where the parameters of a unit are."""

from __future__ import annotations

from enum import Enum


class UnitState(Enum):
    """Where a unit's parameters are; the values are labels in traces. Written by ``Unit`` alone."""

    SHARDED = "sharded"  # each rank holds 1/world; parameters are empty tensors
    UNSHARDING = "gathering"  # the whole buffer is allocated, the all-gather is in flight
    UNSHARDED = "gathered"  # the whole buffer is there, parameters are views of it
