"""Define ZeRO stages 0 to 3 as rows of one table; no other file makes a decision by the number of a stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_zero.errors import ConfigError


@dataclass(frozen=True)
class StagePolicy:
    """Policy of a stage: which state it shards, and when it reduces gradients.

    Attributes:
        stage: Number of the stage, for messages.
        optimizer_sharded: Whether each rank keeps and updates masters and moments of its own shard only.
        parameters_sharded: Whether units are resharded between uses, and unsharded for each use.
        reduces_each_micro_step: Whether gradients are reduced in every backward; otherwise at the boundary only.
        allows_deferral: Whether ``no_sync()`` may postpone the reduction to a later micro-step.
        parameters_in_node: Whether the ranks of a node keep all parameters between them, in the parameters' dtype, and receive them from
            the owners after each update; gradients, masters and optimizer states are sharded over all ranks.
    """

    stage: int
    optimizer_sharded: bool
    parameters_sharded: bool
    reduces_each_micro_step: bool
    allows_deferral: bool
    parameters_in_node: bool = False

    def reduces(self, boundary: bool, in_no_sync: bool) -> bool:
        """Return whether a micro-step's backward reduces, given whether it completes an optimizer step and whether it runs inside
        ``no_sync()``.
        """
        return (self.reduces_each_micro_step or boundary) and not (in_no_sync and self.allows_deferral)


# [Note: when stage 1 reduces] Stage 1 reduces in every backward like stages 2 and 3, because the order of summation affects the result:
# with ranks first and micro-steps second, all three are equal bit for bit under accumulation too. As with DDP, ``no_sync()`` postpones the
# reduction to the boundary and reduces the traffic.
_STAGES = {
    0: StagePolicy(0, optimizer_sharded=False, parameters_sharded=False, reduces_each_micro_step=False, allows_deferral=True),
    1: StagePolicy(1, optimizer_sharded=True, parameters_sharded=False, reduces_each_micro_step=True, allows_deferral=True),
    2: StagePolicy(2, optimizer_sharded=True, parameters_sharded=False, reduces_each_micro_step=True, allows_deferral=False),
    3: StagePolicy(3, optimizer_sharded=True, parameters_sharded=True, reduces_each_micro_step=True, allows_deferral=False),
}
_IN_NODE = {3: replace(_STAGES[3], parameters_in_node=True)}


def stage_policy(stage: int, parameters_in_node: bool = False) -> StagePolicy:
    """Return the policy of ZeRO stage ``stage`` (Rajbhandari et al., arXiv 1910.02054, section 5).

    Args:
        stage: Number of the stage.
        parameters_in_node: See the attribute of ``StagePolicy``.

    Raises:
        ConfigError: The stage is not 0, 1, 2 or 3, or ``parameters_in_node`` is set for a stage other than 3.
    """
    table = _IN_NODE if parameters_in_node else _STAGES
    if stage not in table:
        raise ConfigError(f"zero_optimization.stage is {stage!r}, allowed are {sorted(table)}")
    return table[stage]
