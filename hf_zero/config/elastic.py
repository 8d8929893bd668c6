"""Elastic batch sizes: one global batch that many numbers of ranks can share evenly, as the ``elasticity`` section requests.

Algorithm: DeepSpeed's documentation of elasticity (https://www.deepspeed.ai/docs/config-json/#elastic-training-config-v01-and-v02).
A global batch fits a number of ranks if some allowed micro-batch size divides the share of each rank. The candidates are the micro-batch
sizes and their least common multiple, each times the largest highly composite number that stays below the maximum (such numbers have more
divisors than any smaller one). The candidate that fits most numbers of ranks is used. A least common multiple above the maximum is no
candidate (DeepSpeed uses it, and trains on more samples than the maximum).
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hf_zero.config.batch import ACCUMULATION, MICRO, TOTAL
from hf_zero.config.problems import Problems, show
from hf_zero.config.schema.parallel import Elasticity
from hf_zero.errors import ConfigError

LATEST_VERSION = 0.2
SCHEDULER_VARIABLE = "DEEPSPEED_ELASTICITY_CONFIG"
"""Environment variable in which a cluster's scheduler gives, as JSON, the ``elasticity`` section by which it chooses numbers of ranks."""
_FIRST_TARGET = (0, 3, 8)  # first DeepSpeed version with elasticity
_AGREED = ("max_train_batch_size", "micro_batch_sizes", "version")

# Beyond the size of any job, and small enough to find all divisors of a batch at once.
_MOST_SAMPLES, _MOST_RANKS, _MOST_SIZES = 10**9, 10**6, 64

# https://oeis.org/A002182, up to 720720.
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160, 25200),
    *(27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)


class ElasticityError(ConfigError):
    """Error raised if an elastic batch size cannot be computed. The message names the key, the value and the allowed values."""


class ElasticityConfigError(ElasticityError):
    """Error raised if the ``elasticity`` section is missing, switched off or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """Error raised if no allowed micro-batch size divides the elastic batch over this many ranks."""


@dataclass(frozen=True)
class ElasticBatch:
    """Batch sizes that elasticity computes.

    Attributes:
        total: Global batch, in samples.
        ranks: Numbers of data-parallel ranks that can share it, ascending.
        micro: Largest (or, on request, first) allowed micro-batch size that fits the present number of ranks; None if that is unknown.
    """

    total: int
    ranks: list[int]
    micro: int | None


def elastic_batch(section: Elasticity, world_size: int, first: bool = False) -> ElasticBatch:
    """Return the elastic batch of ``section`` for ``world_size`` ranks (0: unknown).

    Args:
        section: The section ``elasticity``.
        world_size: Number of data-parallel ranks.
        first: With version 0.2, take the first micro-batch size of the list that fits instead of the largest.

    Raises:
        ElasticityError: The section's values contradict each other, or ``world_size`` ranks cannot share the batch.
    """
    _check(section)
    found = _by_ranks(section, world_size) if section.version <= 0.1 else _by_nodes(section, world_size, first)
    if world_size and found.micro is None:
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: {world_size} data-parallel ranks cannot share a batch of {found.total} in micro batches of "
            f"{section.micro_batch_sizes}; possible are {found.ranks}"
        )
    return found


def _check(section: Elasticity) -> None:
    sizes = section.micro_batch_sizes
    if not sizes or min(sizes) < 1 or len(sizes) > _MOST_SIZES:
        raise ElasticityConfigError(
            f"elasticity.micro_batch_sizes is {show(sizes)}; allowed: a list of whole numbers, at least 1, up to {_MOST_SIZES} of them"
        )
    for name, most in (("max_train_batch_size", _MOST_SAMPLES), ("max_gpus", _MOST_RANKS)):
        if getattr(section, name) > most:
            raise ElasticityConfigError(f"elasticity.{name} is {getattr(section, name)}; allowed: at most {most}")
    if max(sizes) > section.max_train_batch_size:
        raise ElasticityConfigError(
            f"elasticity.micro_batch_sizes is {sizes}; none may be larger than max_train_batch_size {section.max_train_batch_size}"
        )
    for name in ("min_gpus", "max_gpus", "model_parallel_size", "num_gpus_per_node"):
        if getattr(section, name) < 1:
            raise ElasticityConfigError(f"elasticity.{name} is {getattr(section, name)}; allowed: at least 1")
    if section.max_gpus < section.min_gpus:
        raise ElasticityConfigError(f"elasticity.max_gpus is {section.max_gpus}; allowed: at least min_gpus, {section.min_gpus}")
    if section.min_time < 0:
        raise ElasticityConfigError(f"elasticity.min_time is {section.min_time}; allowed: at least 0")
    if section.version > LATEST_VERSION:
        raise ElasticityConfigError(f"elasticity.version is {section.version}; allowed: up to {LATEST_VERSION}")
    if section.version <= 0.1 and section.model_parallel_size > 1:
        raise ElasticityConfigError(
            f"elasticity.model_parallel_size is {section.model_parallel_size}; allowed: 1 with elasticity.version {section.version}. Set "
            "version to 0.2"
        )
    if section.num_gpus_per_node % section.model_parallel_size:
        raise ElasticityConfigError(
            f"elasticity.num_gpus_per_node is {section.num_gpus_per_node}, no multiple of model_parallel_size {section.model_parallel_size}"
        )


def _by_ranks(section: Elasticity, world_size: int) -> ElasticBatch:
    """Compute the batch by version 0.1: for any number of ranks."""
    total, ranks = _most_flexible(section, section.max_train_batch_size, section.min_gpus, section.max_gpus)
    if world_size and world_size not in ranks:
        return ElasticBatch(total, ranks, None)
    micro = _fitting(sorted(section.micro_batch_sizes, reverse=True), total, world_size) if world_size else None
    return ElasticBatch(total, ranks, micro)


def _by_nodes(section: Elasticity, world_size: int, first: bool) -> ElasticBatch:
    """Compute the batch by version 0.2: whole nodes join and leave, each with ranks that hold one model together."""
    per_node = section.num_gpus_per_node // section.model_parallel_size
    nodes = (section.min_gpus // section.num_gpus_per_node, section.max_gpus // section.num_gpus_per_node)
    share, fitting_nodes = _most_flexible(section, section.max_train_batch_size // per_node, *nodes)
    total, ranks = share * per_node, [count * per_node for count in fitting_nodes]
    if not world_size:
        return ElasticBatch(total, ranks, None)
    if world_size not in ranks:  # the present number of ranks gets a batch of its own
        ranks = [world_size]
        steps = [micro * world_size for micro in section.micro_batch_sizes]
        totals = [section.max_train_batch_size // step * step for step in steps if step <= section.max_train_batch_size]
        if not totals:
            raise ElasticityIncompatibleWorldSize(
                f"elasticity: {world_size} data-parallel ranks take {min(steps)} samples with the smallest micro batch of "
                f"{section.micro_batch_sizes}, more than max_train_batch_size {section.max_train_batch_size}; raise that, or allow smaller "
                "ones"
            )
        total = max(totals) if section.prefer_larger_batch else min(totals)
    wanted = section.micro_batch_sizes if first else sorted(section.micro_batch_sizes, reverse=True)
    return ElasticBatch(total, ranks, _fitting(wanted, total, world_size))


def _most_flexible(section: Elasticity, largest: int, fewest: int, most: int) -> tuple[int, list[int]]:
    """Return the candidate batch that fits the most numbers of ranks from ``fewest`` to ``most``, and these numbers."""
    sizes = section.micro_batch_sizes
    if largest < max(sizes):
        raise ElasticityConfigError(
            f"elasticity.max_train_batch_size leaves {largest} samples per rank of a node, less than the largest micro batch {max(sizes)}"
        )
    total, ranks = min(sizes), list[int]()
    for candidate in sorted({_scaled(base, largest) for base in (*sizes, math.lcm(*sizes)) if base <= largest}):
        fitting = _ranks_for(candidate, sizes, fewest, most)
        if len(fitting) > len(ranks) or (len(fitting) == len(ranks) and section.prefer_larger_batch):
            total, ranks = candidate, fitting
    return total, ranks


def _scaled(base: int, largest: int) -> int:
    return base * _HIGHLY_COMPOSITE[bisect_right(_HIGHLY_COMPOSITE, largest // base) - 1]


def _ranks_for(total: int, sizes: Sequence[int], fewest: int, most: int) -> list[int]:
    """Return the numbers of ranks for which some micro-batch size divides each rank's share of ``total``."""
    shares = {total // size for size in sizes if total % size == 0}
    return [count for count in _divisors(total, most) if count >= fewest and any(share % count == 0 for share in shares)]


def _divisors(number: int, most: int) -> list[int]:
    """Return the divisors of ``number`` up to ``most``, ascending."""
    small = [divisor for divisor in range(1, min(math.isqrt(number), most) + 1) if number % divisor == 0]
    large = (number // divisor for divisor in reversed(small) if divisor * divisor != number)
    return [divisor for divisor in (*small, *large) if divisor <= most]


def _fitting(sizes: Sequence[int], total: int, world_size: int) -> int | None:
    return next((size for size in sizes if (total // world_size) % size == 0), None)


def take_elastic_batch(data: dict[str, Any], world_size: int, origin: dict[str, str], problems: Problems) -> None:
    """Set the batch keys from an enabled `elasticity` section; report other values in the file, unless the section ignores them."""
    values = data.get("elasticity") or {}
    if not values.get("enabled"):
        return
    try:
        section = Elasticity.model_validate(values)
        _check_against_scheduler(section)
        found = elastic_batch(section, world_size)
    except (ElasticityError, ValidationError) as error:
        problems.error("elasticity", str(error))
        problems.kind = ElasticityConfigError
        return
    micro = found.micro or 1
    for key, value in ((TOTAL, found.total), (MICRO, micro), (ACCUMULATION, found.total // (micro * world_size))):
        if data.get(key, value) != value and not section.ignore_non_elastic_batch_info:
            text = f"is {data[key]}, and elasticity makes it {value}; remove it or set elasticity.ignore_non_elastic_batch_info"
            problems.error(key, text)
            problems.kind = ElasticityConfigError
        data[key], origin[key] = value, "derived <- elasticity and data-parallel size"


def _check_against_scheduler(section: Elasticity) -> None:
    """Compare the section with the scheduler's: a scheduler that counts ranks by other values would start jobs that cannot train."""
    text = os.environ.get(SCHEDULER_VARIABLE)
    if not text:
        return
    try:
        expected = Elasticity.model_validate({key: value for key, value in json.loads(text).items() if key in _AGREED})
    except (ValueError, AttributeError) as failure:
        raise ElasticityConfigError(f"environment variable {SCHEDULER_VARIABLE} is no elasticity section in JSON: {failure}") from None
    for name in _AGREED:
        ours, theirs = getattr(section, name), getattr(expected, name)
        if ours != theirs:
            raise ElasticityConfigError(f"elasticity.{name} is {ours}, and {SCHEDULER_VARIABLE} says {theirs}; make them the same")


# -- the functions of deepspeed.elasticity ----------------------------------------------------------------------------


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether a configuration dictionary switches elasticity on."""
    return bool((ds_config.get("elasticity") or {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str = "", world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int | None]:
    """Return the elastic batch of a configuration.

    Args:
        ds_config: Dictionary with an ``elasticity`` section that is switched on.
        target_deepspeed_version: A version from 0.3.8 on, the first with elasticity; all versions compute the same.
        world_size: Number of data-parallel ranks; 0 if unknown (version 0.2 then reads ``WORLD_SIZE``).
        return_microbatch: Return the micro-batch size even if ``world_size`` is 0; ``WORLD_SIZE`` is then the number of ranks.

    Returns:
        Global batch in samples, numbers of ranks that can share it, and, if requested or known, the micro-batch size.

    Raises:
        ElasticityConfigError: The section is missing, switched off or wrong, the version too old, or the number of ranks unknown.
        ElasticityIncompatibleWorldSize: ``world_size`` ranks cannot share the batch.
    """
    _check_target(target_deepspeed_version)
    if not isinstance(ds_config, Mapping):
        raise ValueError(f"compute_elastic_config needs the configuration as a dictionary, got {type(ds_config).__name__}")
    if "elasticity" not in ds_config:
        raise ElasticityConfigError("the configuration has no `elasticity` section")
    section = _read(ds_config["elasticity"])
    if not section.enabled:
        raise ElasticityConfigError("elasticity.enabled is false; set it to true")
    ranks_now = world_size
    if not ranks_now and (section.version > 0.1 or return_microbatch):
        ranks_now = int(os.environ.get("WORLD_SIZE") or 0) // section.model_parallel_size
        if not ranks_now:
            what = "return_microbatch" if return_microbatch else "elasticity.version 0.2"
            raise ElasticityConfigError(f"{what} needs the number of ranks: pass world_size or set WORLD_SIZE")
    # As in DeepSpeed, ``prefer_larger_batch`` chooses the micro batch only where the caller does not know the number of ranks.
    found = elastic_batch(section, ranks_now, first=not world_size and not section.prefer_larger_batch)
    if world_size or return_microbatch:
        return found.total, found.ranks, found.micro
    return found.total, found.ranks


def _check_target(version: str) -> None:
    numbers = tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version)[:3])
    if numbers and numbers < _FIRST_TARGET:
        raise ElasticityConfigError(f"target_deepspeed_version is {version!r}; allowed: from {'.'.join(map(str, _FIRST_TARGET))} on")


def _read(values: Mapping[str, Any]) -> Elasticity:
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if values.get("enabled") and name not in values:
            raise ElasticityConfigError(f"elasticity.{name} is missing")
    try:
        return Elasticity.model_validate(dict(values))
    except ValidationError as failure:
        first = failure.errors()[0]
        key = ".".join(str(step) for step in first["loc"])
        raise ElasticityConfigError(f"elasticity.{key} is {first['input']!r}: {first['msg']}") from None
