"""Test ``hf_zero/core/step/grad_norm.py``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.comm.back_end import build_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.topology import build_topology
from hf_zero.core.step import grad_norm
from hf_zero.core.step.grad_norm import ModelAxis, clip_factor, first_non_finite, global_norm
from hf_zero.core.units.layout import Range, build_layout
from hf_zero.errors import ConfigError
from tests.support import ranks


@pytest.fixture
def collectives() -> Iterator[Collectives]:
    yield build_collectives(build_topology())
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("numel", [1, 65_535, 65_537, 3_000_000])
def test_norm_of_large_flat_shards_is_accurate(numel: int, collectives: Collectives) -> None:
    shards = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3 for seed in range(2)]
    truth = torch.cat(shards).double().norm().item()
    assert float(global_norm(shards, collectives, sharded=True)) == pytest.approx(truth, rel=5e-7)


def test_norm_without_gradients_is_zero_and_of_infinity_is_infinite(collectives: Collectives) -> None:
    assert float(global_norm([], collectives, sharded=True)) == 0.0
    assert float(global_norm([torch.tensor([1.0, float("inf")])], collectives, sharded=True)) == float("inf")
    assert torch.isnan(global_norm([torch.tensor([1.0, float("nan")])], collectives, sharded=True))


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 5.0])
def test_clip_factor_is_that_of_torch(max_norm: float) -> None:
    grad = torch.tensor([3.0, 4.0])
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = grad.clone()
    if max_norm:
        torch.nn.utils.clip_grad_norm_([param], max_norm)
    assert torch.equal(grad * clip_factor(grad.norm(), max_norm), param.grad)


def _norm_over_two_axes() -> None:
    topology = build_topology(model_parallel=2)
    assert topology.model is not None
    rank = torch.distributed.get_rank()
    assert (topology.rank, topology.world, topology.model.rank, topology.model.world) == (rank // 2, 2, rank % 2, 2)
    assert build_topology(model_parallel=2).group is topology.group, "groups are made once"

    # Elements 10 to 29 and 60 to 64 are copies, equal on the ranks of the model axis; the rest are slices of their own.
    parts = (Range(10, 30), Range(60, 65))
    copied = torch.randn(100, generator=torch.Generator().manual_seed(topology.rank))
    shard = torch.randn(100, generator=torch.Generator().manual_seed(100 + rank))
    for part in parts:
        shard[part.start : part.stop] = copied[part.start : part.stop]
    model = ModelAxis(build_collectives(topology.model), (tuple((part, 2) for part in parts),), (1,))
    norm = global_norm([shard], build_collectives(topology), True, model)

    once = torch.ones(100, dtype=torch.bool)
    if topology.model.rank == 1:
        for part in parts:
            once[part.start : part.stop] = False
    truth = shard[once].double().square().sum()
    torch.distributed.all_reduce(truth)
    assert float(norm) == pytest.approx(float(truth.sqrt()), rel=1e-6)


def test_norm_counts_copies_on_the_model_axis_once() -> None:
    ranks.run_ranks(_norm_over_two_axes, 4)


def _indivisible() -> None:
    with pytest.raises(ConfigError, match=r"autotp_size is 2, which does not divide the 3 ranks; 1, 3 would"):
        build_topology(model_parallel=2)


def test_model_axis_must_divide_the_ranks() -> None:
    ranks.run_ranks(_indivisible, 3)


@pytest.mark.parametrize(("norm", "max_norm"), [(0.5, 1.0), (1e-8, 1.0), (3.0, 0.0)])
def test_small_gradients_are_left_as_they_are(norm: float, max_norm: float) -> None:
    assert clip_factor(torch.tensor(norm), max_norm) == 1.0


def test_the_first_parameter_that_is_not_finite_is_named() -> None:
    layouts = [build_layout(unit, [(f"{unit}.{name}", torch.Size([16])) for name in "ab"], [0, 0], torch.float32, 1)[0] for unit in "xy"]
    units: Any = [SimpleNamespace(layout=layout) for layout in layouts]
    shards = [torch.zeros(32), torch.zeros(32)]
    collectives: Any = SimpleNamespace(gather_objects=lambda value, what: [value, (4, "y.b")])
    assert first_non_finite(units, shards, collectives, whole=True) == "y.b", "another rank's"
    shards[0][20], shards[1][3] = torch.inf, torch.nan
    assert first_non_finite(units, shards, collectives, whole=True) == "x.b"


def test_copies_of_16_bit_gradients_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [torch.randn(numel).bfloat16() for numel in (40, 40, 40, 300, 5, 5)]
    wanted = torch._foreach_norm([piece.float() for piece in pieces])
    monkeypatch.setattr(grad_norm, "_COPIED", 100)
    seen: list[int] = []
    whole = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda tensors: seen.append(sum(map(torch.Tensor.numel, tensors))) or whole(tensors))
    assert torch.equal(torch.stack(grad_norm._norms(pieces)), torch.stack(wanted))
    assert seen == [80, 40, 300, 10], "at most 100 elements, or one piece"
