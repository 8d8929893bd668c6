"""Test that models that differ between ranks raise one error on all of them, before anything is exchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support import ranks


class Small(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, width), nn.Linear(width, 1)
        self.register_buffer("scale", torch.ones(2))


def _vocabulary(rank: int) -> Small:
    return Small(8 + rank)


def _frozen(rank: int) -> Small:
    model = Small(8)
    model.first.bias.requires_grad_(rank == 0)
    return model


def _extra(rank: int) -> Small:
    model = Small(8)
    if rank:
        model.tail = nn.Linear(1, 1)
    return model


def _buffer(rank: int) -> Small:
    model = Small(8)
    if rank:
        model.scale = torch.ones(3)
    return model


def _initialize(build: Callable[[int], Small], stage: int) -> str:
    import hf_zero
    from hf_zero.errors import StateError

    model = build(torch.distributed.get_rank())
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
    try:
        hf_zero.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    except StateError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("build", "first", "other"),
    [
        (_vocabulary, "first.weight (8, 4) torch.float32 in param group 0", "first.weight (9, 4) torch.float32 in param group 0"),
        (_frozen, "first.bias (8,) torch.float32 in param group 0", "first.bias (8,) torch.float32 frozen"),
        (_extra, "buffer scale (2,) torch.float32", "tail.weight (1, 1) torch.float32 in param group 0"),
        (_buffer, "buffer scale (2,) torch.float32", "buffer scale (3,) torch.float32"),
    ],
)
def test_the_first_difference_is_named(build: Callable[[int], Small], first: str, other: str, stage: int) -> None:
    texts = ranks.run_ranks(_initialize, 2, build, stage)
    assert texts[0] == texts[1]
    assert f"rank 0 has {first}, rank 1 has {other}" in texts[0]


def test_equal_models_pass() -> None:
    assert ranks.run_ranks(_initialize, 2, _equal, 3) == ["nothing was raised"] * 2


def _equal(rank: int) -> Small:
    return Small(8)


def _another_extent() -> str:
    import hf_zero

    rank = torch.distributed.get_rank()
    model = Small(8)
    kind = torch.optim.Adafactor if rank else torch.optim.AdamW
    try:
        hf_zero.initialize(model=model, optimizer=kind(model.parameters()), config={"train_micro_batch_size_per_gpu": 1})
    except hf_zero.errors.StateError as error:
        return str(error)
    return "nothing was raised"


def test_optimizers_of_another_extent_are_named_everywhere() -> None:
    for answer in ranks.run_ranks(_another_extent, 2):
        assert "rank 0 has an optimizer that updates flat shards, rank 1 has an optimizer that updates whole tensors" in answer
