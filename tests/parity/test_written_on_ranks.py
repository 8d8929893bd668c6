"""Parameters that ranks write with different values, or one rank alone, while each has them whole: the values of all ranks, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.errors import StateError
from tests.support import ranks

ROWS = 10


class _Net(nn.Module):
    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 8, max_norm=max_norm)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).pow(2).sum()  # type: ignore[no-any-return]


def _engine(stage: int, net: nn.Module) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return hf_zero.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5), config=config)[0]


def _step(engine: Any, rows: list[int]) -> None:
    engine.backward(engine(torch.tensor(rows)))
    engine.step()


def _error(engine: Any, rows: list[int]) -> str:
    with pytest.raises(StateError) as raised:
        _step(engine, rows)
    return str(raised.value)


def _rows_of_a_rank(stage: int) -> str:
    """Train with a table that renormalizes the rows that a rank looks up: first the same on all ranks."""
    torch.manual_seed(0)
    engine = _engine(stage, _Net(max_norm=1.0))
    _step(engine, [1, 2, 3])
    return _error(engine, [4, 5] if dist.get_rank() == 0 else [6, 7])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_table_whose_ranks_renormalize_different_rows_is_an_error(stage: int) -> None:
    first, second = ranks.run_ranks(_rows_of_a_rank, 2, stage)
    assert first == second and "parameter table.weight was written on rank(s) 0" in first and "nn.Embedding(max_norm=...)" in first


def _writes_between(stage: int, kind: str) -> str:
    torch.manual_seed(0)
    net = _Net()
    engine, me = _engine(stage, net), dist.get_rank()
    _step(engine, [1, 2])
    with torch.no_grad():
        if kind == "in place":
            net.table.weight[me].mul_(0.5)
        elif kind == "assigned":
            net.table.weight.data = net.table.weight.data * (1.0 + me)
        elif me == 0:
            net.table.weight[0].mul_(0.5)
    return _error(engine, [1, 2])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", ["in place", "assigned", "on one rank"])
def test_values_that_differ_between_ranks_are_an_error(stage: int, kind: str) -> None:
    first, second = ranks.run_ranks(_writes_between, 2, stage, kind)
    assert first == second and "parameter table.weight was written on rank(s) 0" in first, (first, second)


def _swaps(stage: int) -> list[torch.Tensor]:
    """Evaluate on rank 0 alone with averaged weights, and on all ranks with clipped ones, which stay."""
    torch.manual_seed(0)
    net = _Net()
    engine = _engine(stage, net)
    for step in range(3):
        _step(engine, [step, 2 * step + dist.get_rank()])
        with torch.no_grad():
            if dist.get_rank() == 0:
                kept = [param.clone() for param in net.parameters()]
                for param in net.parameters():
                    param.mul_(0.9)
                engine.module(torch.tensor([1]))
                for param, value in zip(net.parameters(), kept, strict=True):
                    param.copy_(value)
            net.table.weight.clamp_(-0.5, 0.5)
    return [param.detach().clone() for param in net.parameters()]


def test_values_that_one_rank_writes_and_takes_back_are_none() -> None:
    for stage in (1, 2):
        plain = ranks.run_ranks(_swaps, 2, 0)
        for expected, found in zip(plain, ranks.run_ranks(_swaps, 2, stage), strict=True):
            assert all(torch.allclose(left, right, atol=1e-6) for left, right in zip(expected, found, strict=True))
