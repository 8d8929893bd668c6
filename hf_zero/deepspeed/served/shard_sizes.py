"""How DeepSpeed divides a dimension or heads over ranks that do not divide it: as evenly as that goes, the first ranks have one more."""

from __future__ import annotations

from hf_zero.deepspeed.served.comm import get_rank


def get_shard_size(total_size: int, mp_size: int, name: str | None = None, rank: int | None = None) -> int:
    """Elements of ``total_size`` that one of ``mp_size`` ranks has.

    Args:
        total_size: Elements of the whole.
        mp_size: Ranks.
        name: Has no effect.
        rank: Which one; None is this process'.
    """
    which = get_rank() if rank is None else rank
    return total_size // mp_size + (which < total_size % mp_size)


def get_shard_size_list(total_size: int, mp_size: int, name: str | None = None) -> list[int]:
    """``get_shard_size`` of each rank."""
    return [get_shard_size(total_size, mp_size, name, rank) for rank in range(mp_size)]
