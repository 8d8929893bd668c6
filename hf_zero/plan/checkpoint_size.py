"""How large a checkpoint is: what ``save_checkpoint`` would write, as one rank plans it, times those that write the like."""

from __future__ import annotations

from hf_zero.checkpoint.contents import contents_of
from hf_zero.checkpoint.format.names import MODULE
from hf_zero.checkpoint.state.training_state import Holders, TrainingState
from hf_zero.core.units.packed import is_packed, is_wrapped
from hf_zero.core.units.tp_shard import is_expert


def checkpoint_bytes(state: TrainingState) -> int:
    """Bytes of tensors in the files of all ranks; with a pipeline of those that have this rank's stage. Names and the index come on top.

    What an optimizer keeps of whole parameters is taken to be shared out evenly.
    """
    together, of_experts = state.holders, {unit.name for unit in state.units if unit.collectives.topology.of_experts}
    total = _whole_bytes(state)
    for file, entries in contents_of(state, exclude_frozen=False).files.items():
        if file.startswith(MODULE):  # shared out by size, so this rank's part says nothing of the others'
            continue
        for entry in entries:
            experts = entry.name in of_experts
            holders = state.holders_of_experts if experts else together
            ranks = holders.world * _parts(state, holders)
            total += entry.nbytes * ranks
    return total


def _parts(state: TrainingState, holders: Holders) -> int:
    """Ranks that hold one stage's tensors together."""
    pipe = state.collectives.topology.pipe
    return holders.parts // (pipe.world if pipe is not None else 1)


def _whole_bytes(state: TrainingState) -> int:
    """Parameters without unit, and buffers: once, or every part of what is divided."""
    first, total = state.holders.part == 0, 0
    for name, param in state.loose_params():
        if is_packed(param) or is_wrapped(param):
            continue
        if state.tensor.tp_shard_of(name, param.shape).dim is not None:
            total += param.nbytes * _parts(state, state.holders_of_experts if is_expert(param) else state.holders)
        elif first:
            total += param.nbytes
    return total + (sum(buffer.nbytes for buffer in state.buffers().values()) if first else 0)
