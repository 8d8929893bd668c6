"""Layers that a script divides over ranks itself and marks as Megatron does, with the groups of an ``mpu`` object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero
from hf_zero.comm.topology import build_topology
from hf_zero.core.units.layout import Range
from hf_zero.core.units.marks import tp_shard_of
from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.split import mark_own_layers
from tests.support import ranks
from tests.tensor_parallel.mpu import Mpu, made

WIDTH, INNER = 4, 8


class Sum(torch.autograd.Function):
    """The sum over all ranks; the gradient is everybody's already."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class OwnMlp(nn.Module):
    """An MLP whose inner width is divided over all ranks; the bias of the result is whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Parameter(torch.randn(INNER, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, INNER))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def divide(self, rank: int, world: int) -> OwnMlp:
        own = slice(rank * INNER // world, (rank + 1) * INNER // world)
        self.up, self.down = nn.Parameter(self.up.data[own].clone()), nn.Parameter(self.down.data[:, own].clone())
        self.up.tensor_model_parallel, self.up.partition_dim = True, 0  # type: ignore[attr-defined]
        self.down.model_parallel, self.down.partition_dim = True, 1  # type: ignore[attr-defined]
        self.bias.tensor_model_parallel, self.bias.partition_dim = False, -1  # type: ignore[attr-defined]
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        part = torch.tanh(inputs @ self.up.T) @ self.down.T
        return (Sum.apply(part) if self.up.shape[0] < INNER else part) + self.bias


def _train(folder: str, stage: int) -> tuple[list[float], list[Tensor]]:
    """Norms and weights of two clipped steps on two ranks, saved after the first; one rank loads that and makes the second."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }
    model, mpu = OwnMlp(), Mpu(made([list(range(world))]), made([[place] for place in range(world)]))
    engine = hf_zero.initialize(model=model.divide(rank, world) if world > 1 else model, config=config, mpu=mpu)[0]
    if world == 1:
        assert engine.load_checkpoint(folder)[0] is not None
    norms = []
    for step in range(2) if world > 1 else [1]:
        engine.backward(engine(torch.full((2, WIDTH), 0.1 + step)).square().sum())
        engine.step()
        norms.append(engine.get_global_grad_norm())
        if step == 0:
            engine.save_checkpoint(folder)
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        values = [param.detach().clone() for param in model.parameters()]
    engine.destroy()
    return norms, values


def _plain() -> tuple[list[float], list[list[Tensor]]]:
    model, norms, weights = OwnMlp(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((2, WIDTH), 0.1 + step)).square().sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        weights.append([param.detach().clone() for param in model.parameters()])
    return norms, weights


@pytest.mark.parametrize("stage", [0, 3])
def test_every_element_counts_once(stage: int, tmp_path: Path) -> None:
    """Without the marks a part would count as a copy: the norm is too small, and of a checkpoint one rank's part is left."""
    norms, weights = _plain()
    for place, (found, values) in enumerate(ranks.run_ranks(_train, 2, str(tmp_path), stage)):
        own = slice(place * INNER // 2, (place + 1) * INNER // 2)
        assert found == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(values, [weights[1][0][own], weights[1][1][:, own], weights[1][2]])
    ((found, values),) = ranks.run_ranks(_train, 1, str(tmp_path), stage)
    assert found == pytest.approx(norms[1:], rel=1e-5)
    torch.testing.assert_close(values, weights[1])


def _strides() -> None:
    layer = nn.Linear(3, 4)
    layer.weight.tensor_model_parallel, layer.weight.partition_stride = True, 2  # type: ignore[attr-defined]
    mark_own_layers(layer, build_topology())
    part, size = tp_shard_of(layer.weight), 4 * dist.get_world_size()
    assert part is not None and part.full_shape == (size, 3) and part.dim == 0 and tp_shard_of(layer.bias) is None
    first = 2 * dist.get_rank()
    assert part.ranges == (Range(first, first + 2), Range(first + size // 2, first + 2 + size // 2))
    layer.bias.model_parallel, layer.bias.partition_dim = True, 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"bias \(4,\) is marked .* partition_dim 1"):
        mark_own_layers(layer, build_topology())


def test_pieces_of_a_weight() -> None:
    ranks.run_ranks(_strides, 2)
