"""Decide whether plans of models with few blocks predict a model with many, and how many blocks the small models need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_zero.config.auto import hidden_size_of
from hf_zero.errors import ConfigError
from hf_zero.offload.file_states import LEAST_NUMEL
from hf_zero.plan.inputs import ModelWish
from hf_zero.plan.models import build_model, takes_every

_LEAST = 4  # blocks of the smallest model; with fewer, too few are between the first and the last
_WORTH = 2.5  # minimum ratio of all blocks to the larger of two small models, which usually replace the whole one
_SETTING = "num_hidden_layers"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names in transformers' configurations
# Limits of a configuration that count elements, with their defaults and the least that the engine takes.
_GATHERED = {
    "stage3_max_reuse_distance": (1e9, 0),
    "stage3_max_live_parameters": (1e9, 0),
    "stage3_prefetch_bucket_size": (5e7, 0),
    "stage3_model_persistence_threshold": (float("inf"), 0),
}
_OWNED = {"sub_group_size": (1e9, LEAST_NUMEL)}


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model.

    Attributes:
        wish: Description of the model.
        count: Number of blocks.
        numel: Number of elements of one block.
        total: Number of elements of the model.
        alike: Whether all blocks compute the same and have parameters.
        kind: The configuration's name of each block in ``layer_types``; "" without one.
        experts: Whether the configuration names experts.
        positions: Length of the longest sequence in tokens; 0 if the configuration has no limit.
        every: Whether the model can recompute every n-th block only.
        hidden: Hidden size, from which "auto" sizes of a configuration follow; None if it has no usual name.
    """

    wish: ModelWish
    count: int = 0
    numel: int = 0
    total: int = 0
    alike: bool = False
    kind: str = ""
    experts: bool = False
    positions: int = 0
    every: bool = False
    hidden: int | None = None

    def few(self, count: int) -> ModelWish:
        """Return the description of the same model with ``count`` blocks."""
        kinds = {"layer_types": [self.kind] * count} if self.kind else {}
        return replace(self.wish, settings={**self.wish.settings, _SETTING: count, **kinds})

    def counts(self, config: Mapping[str, Any], tensor: int, shards: int, step: int = 1) -> tuple[int, int, int] | None:
        """Return three numbers of blocks to plan ([Note: few blocks]); None if the whole model must be planned.

        For each limit of the configuration that counts elements, either the whole model stays below it, or the smallest of the three
        models exceeds it.

        Args:
            config: The DeepSpeed configuration.
            tensor: Tensor-parallel size.
            shards: Number of ranks over which ZeRO shards states.
            step: Every ``step``-th block is recomputed. The three numbers differ by ``step``, and from the number of all blocks by a
                multiple of it.
        """
        if not self.alike:
            return None
        zero, least = config.get("zero_optimization", {}), _LEAST
        offloads = any(name in zero for name in ("offload_optimizer", "offload_param"))
        gathered = _GATHERED if zero.get("stage") == 3 else {}
        # a gathered block counts once in forward and once in backward
        for table, times, share in ((gathered, 2, tensor), (_OWNED if offloads else {}, 1, tensor * shards)):
            for name, (default, lowest) in table.items():
                value = zero.get(name)
                limit = share * max(value if isinstance(value, (int, float)) else default, lowest)
                if times * self.total > limit:
                    least = max(least, math.ceil(limit / (times * self.numel)) + 1)
        least += (self.count - least) % step
        return (least, least + step, least + 2 * step) if _WORTH * (least + step) < self.count else None


def blocks_of(wish: ModelWish) -> Blocks:
    """Return the repeated blocks of a model of transformers; for other models, ``Blocks`` with ``alike=False``."""
    planned = build_model(wish)
    module, positions = planned.module, planned.positions
    config = getattr(module, "config", None)
    count = getattr(config, _SETTING, None)
    experts = any(getattr(config, name, None) for name in _EXPERTS)
    found = Blocks(wish, experts=experts, positions=positions, hidden=hidden_size_of(module))
    if wish.name.startswith("python:") or not isinstance(count, int):
        return found
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    kinds = getattr(config, "layer_types", None) or []
    if len(lists) != 1 or len(set(kinds)) > 1:
        return replace(found, count=count)
    fingerprints = {fingerprint_of(block, index) for index, block in enumerate(lists[0])}
    numel = sum(param.numel() for param in lists[0][0].parameters())
    total = sum(param.numel() for param in module.parameters())
    alike, every = len(fingerprints) == 1 and numel > 0, takes_every(module, count)
    kind = kinds[0] if kinds else ""
    found = replace(found, count=count, numel=numel, total=total, alike=alike, kind=kind, every=every)
    try:
        build_model(found.few(_LEAST))
    except ConfigError:  # another key of the configuration depends on the number of blocks
        return replace(found, alike=False)
    return found


def fingerprint_of(block: nn.Module, index: int) -> str:
    """Return a text that is equal for blocks that compute the same; ``index`` is the block's number, which it leaves out."""
    params = [(name, tuple(param.shape), param.requires_grad) for name, param in block.named_parameters()]
    parts = []
    for name, part in block.named_modules():
        plain = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, (bool, int, float, str)) and not _numbers(key, value, index)
        }
        parts.append((name, type(part).__name__, sorted(plain.items(), key=str)))
    return repr((params, parts))


def _numbers(key: str, value: object, index: int) -> bool:
    return type(value) is int and value == index and ("idx" in key or "index" in key or key.endswith("id"))
