"""Test how the blocks of a model are found: modules under several names, and modules that replace their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from hf_zero.core.units.grouping import NamedParam, build_blocks, find_blocks
from hf_zero.errors import UnsupportedError
from tests.support.models import Mlp


class Replacing(nn.Linear):
    """A layer that registers its weight anew whenever it is asked for its modules, as PEFT's LoRA over attention does."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        self.weight = nn.Parameter(self.weight.data)
        return super().named_modules(*args, **kwargs)


def test_a_module_that_replaces_its_parameters_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"attn": Replacing(2, 2)}))
    members = [NamedParam(name, param, 0) for name, param in model.named_parameters()]
    with pytest.raises(UnsupportedError, match=r"module 1\.attn replaces its parameters .* \(1 parameters: 1\.attn\.weight\)"):
        build_blocks(model, members)


def test_a_module_with_two_names_is_a_block_under_the_first() -> None:
    model = Mlp()
    blocks = model._modules.pop("blocks")
    model.first, model.blocks = blocks[0], blocks
    assert list(find_blocks(model)) == ["first", "blocks.1", "blocks.2"]
    assert list(find_blocks(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)))) == ["0", "1"]
