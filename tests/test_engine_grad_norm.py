"""Twin of ``hf_zero/engine/grad_norm.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_zero.comm.collectives import Collectives, build_collectives
from hf_zero.comm.topology import build_topology
from hf_zero.engine.grad_norm import clip_factor, global_norm


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
