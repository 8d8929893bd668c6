"""The batch identity: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel size."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hf_zero.config.problems import Problems

TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """The three batch sizes, in samples, and the number of data-parallel ranks between them."""

    total: int
    micro: int
    accumulation: int
    world_size: int

    def line(self) -> str:
        """Return the identity with its numbers, as `explain` prints it; where it does not hold, the text says "is not"."""
        sign = "=" if self.total == self.micro * self.accumulation * self.world_size else "is not"
        return (
            f"{TOTAL} {self.total} {sign} {MICRO} {self.micro} x {ACCUMULATION} {self.accumulation} x data-parallel size {self.world_size}"
        )


def solve(total: int | None, micro: int | None, accumulation: int | None, world_size: int, problems: Problems) -> Batch:
    """Derive the missing batch sizes and check the identity.

    Args:
        total, micro, accumulation: The values of the configuration; None if not given. Accumulation defaults to 1, then micro to 1.
        world_size: Number of data-parallel ranks.
        problems: Collector that gets an error with the three numbers if they contradict each other.
    """
    given = {MICRO: micro, ACCUMULATION: accumulation}
    if total is not None and micro is not None and accumulation is None:
        accumulation = max(1, total // (micro * world_size))
    if accumulation is None:
        accumulation = 1
    if micro is None:
        micro = 1 if total is None else max(1, total // (accumulation * world_size))
    product = micro * accumulation * world_size
    batch = Batch(product if total is None else total, micro, accumulation, world_size)
    if batch.total != product:
        problems.error(TOTAL, _contradiction(batch, {key: value for key, value in given.items() if value is not None}))
    return batch


def _contradiction(batch: Batch, given: dict[str, int]) -> str:
    """Return the error of a `train_batch_size` that contradicts the ``given`` keys, or that the ranks do not divide."""
    factors = " x ".join(f"{value} ({key})" for key, value in [*given.items(), ("data-parallel size", batch.world_size)])
    product = batch.world_size * math.prod(given.values())
    if len(given) == 2:
        remedy = 'Give any two of the three keys, or correct one; "auto" for a key takes it from the script'
        return f"does not fit: {batch.total} is not {factors} = {product}. {remedy}"
    equal = f" = {product}" if given else ""
    return f"does not fit: {batch.total} is not a multiple of {factors}{equal}. Set it to a multiple of {product}"


def count_replicas_once(config: dict[str, Any], replicas: int, mistaken: Collection[int]) -> dict[str, Any]:
    """Return ``config`` with ``train_batch_size`` counted over ``replicas`` ranks, where it was counted over another number of ranks.

    accelerate multiplies by the number of processes, or by the data-parallel sizes of its ParallelismConfig, which are 1 where a script
    has left them out. But ranks that hold one model or one sequence together share their samples.

    Args:
        config: The configuration as the user gave it.
        replicas: Number of ranks, or groups of ranks, that train on samples of their own.
        mistaken: Numbers that may have been used in its place.
    """
    total, micro, steps = (config.get(key) for key in (TOTAL, MICRO, ACCUMULATION))
    if not (isinstance(total, int) and isinstance(micro, int) and isinstance(steps, int)):
        return config  # with two of the three values the third is derived
    one = micro * steps
    wrong = total != one * replicas and total in [one * number for number in mistaken]
    return {**config, TOTAL: one * replicas} if wrong else config


def other_share(config: dict[str, Any], replicas: int, ranks: int) -> tuple[str, int, int] | None:
    """Return the batch size that ``config`` leaves to be derived, if it differs between ``replicas`` and ``ranks``.

    Returns:
        Key of the batch size, its value for ``replicas`` and its value for ``ranks``; None if both give one value, or if the key is given.
    """
    total, *both = (config.get(key) for key in (TOTAL, MICRO, ACCUMULATION))
    given = [value for value in both if isinstance(value, int)]
    if not isinstance(total, int) or len(given) != 1 or total % (given[0] * ranks):
        return None
    return ACCUMULATION if isinstance(both[0], int) else MICRO, total // (given[0] * replicas), total // (given[0] * ranks)
