"""Whether a model with few blocks stands for one with many, and how few may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.plan.model_wish import ModelWish
from hf_zero.plan.models import build_model

_LEAST = 4  # below, the first and the last block are neighbours of too few
_WORTH = 2.5  # times the larger of two small models, which are mostly planned in place of a whole one
_SETTING = "num_hidden_layers"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as transformers' configurations name them
# Limits of a configuration that count elements, and the values they have where nothing is said.
_GATHERED = {
    "stage3_max_reuse_distance": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_model_persistence_threshold": float("inf"),
}
_OWNED = {"sub_group_size": 1e9}


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model.

    Attributes:
        wish: The model.
        count: How many there are.
        numel: Elements of one.
        total: Elements of the model.
        alike: Every one is like the next.
        kind: What the configuration calls each of them, if it does.
        experts: The model has some.
        positions: Tokens of the longest sequence; 0 where the configuration speaks of none.
    """

    wish: ModelWish
    count: int = 0
    numel: int = 0
    total: int = 0
    alike: bool = False
    kind: str = ""
    experts: bool = False
    positions: int = 0

    def few(self, count: int) -> ModelWish:
        """The model with ``count`` blocks."""
        kinds = {"layer_types": [self.kind] * count} if self.kind else {}
        return replace(self.wish, settings={**self.wish.settings, _SETTING: count, **kinds})

    def counts(self, config: Mapping[str, Any], tensor: int, shards: int) -> tuple[int, int, int] | None:
        """Three sizes in a row that [Note: few blocks] holds for; None where the whole model has to be planned.

        Every limit of the configuration that counts elements must be out of reach of the whole model, or be passed by the smallest of
        the three.

        Args:
            config: The DeepSpeed configuration.
            tensor: Ranks that hold one model together.
            shards: Ranks that share what each of them holds.
        """
        if not self.alike:
            return None
        zero, least = config.get("zero_optimization", {}), _LEAST
        offloads = any(name in zero for name in ("offload_optimizer", "offload_param"))
        gathered = _GATHERED if zero.get("stage") == 3 else {}
        # a gathered block is passed in forward and in backward
        for table, times, share in ((gathered, 2, tensor), (_OWNED if offloads else {}, 1, tensor * shards)):
            for name, default in table.items():
                said = zero.get(name)
                limit = share * (said if isinstance(said, (int, float)) else default)
                if times * self.total > limit:
                    least = max(least, math.ceil(limit / (times * self.numel)) + 1)
        return (least, least + 1, least + 2) if _WORTH * (least + 1) < self.count else None


def blocks_of(wish: ModelWish) -> Blocks:
    """The repeated blocks of a model that a configuration of transformers describes; none are alike in others."""
    planned = build_model(wish)
    module, positions = planned.module, planned.positions
    config = getattr(module, "config", None)
    count = getattr(config, _SETTING, None)
    experts = any(getattr(config, name, None) for name in _EXPERTS)
    if wish.name.startswith("python:") or not isinstance(count, int):
        return Blocks(wish, experts=experts, positions=positions)
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    kinds = getattr(config, "layer_types", None) or []
    if len(lists) != 1 or len(set(kinds)) > 1:
        return Blocks(wish, count, experts=experts, positions=positions)
    signs = {sign_of(block, index) for index, block in enumerate(lists[0])}
    numel = sum(param.numel() for param in lists[0][0].parameters())
    total = sum(param.numel() for param in module.parameters())
    found = Blocks(wish, count, numel, total, len(signs) == 1 and numel > 0, kinds[0] if kinds else "", experts, positions)
    try:
        build_model(found.few(_LEAST))
    except ConfigError:  # other values of the configuration count blocks as well
        return replace(found, alike=False)
    return found


def sign_of(block: nn.Module, index: int) -> str:
    """All that says what a block computes, but its number."""
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
