"""Losses that use a part of a divided layer's activations: an error on all ranks, and exact once the layer is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError
from hf_zero.tensor_parallel.split import tp_model_init
from tests.support import ranks

STEPS = 3


def _size(inner: torch.Tensor) -> torch.Tensor:
    return inner.float().square().sum() / 20


class Block(nn.Module):
    """Feed-forward block that keeps its inner activations, of which each rank may have a part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.kept: Any = None

    def forward(self, hidden: torch.Tensor, aux: bool) -> torch.Tensor:
        inner = torch.nn.functional.gelu(self.up(self.norm(hidden)))
        self.kept = inner
        return hidden + self.down(inner) + (_size(inner) if aux else 0.0)


class Net(nn.Module):
    """Two blocks; ``aux`` selects a branch that the trace of a plan does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(24, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 24)

    def forward(self, input_ids: torch.Tensor, aux: bool = False) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, aux)
        return self.head(hidden)


def plain(model: Any, ids: torch.Tensor, step: int) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def branch(model: Any, ids: torch.Tensor, step: int) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids, aux=step > 0).flatten(0, 1), ids.flatten())


def outside(model: Any, ids: torch.Tensor, step: int) -> torch.Tensor:
    loss = plain(model, ids, step)
    blocks = getattr(model, "module", model).blocks
    return loss + sum(_size(block.kept) for block in blocks) if step > 0 else loss


def of_step(step: int, group: int) -> torch.Tensor:
    return torch.randint(24, (2, 6), generator=torch.Generator().manual_seed(10 * step + group))


def _trained(
    loss_of: Callable[[Any, torch.Tensor, int], torch.Tensor], stage: int, whole: bool, dtype: str
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the error of each step, and the weights after the steps."""
    torch.manual_seed(0)
    section: dict[str, Any] = {"autotp_size": 2}
    if whole:
        section["partition_config"] = {"layer_specs": [{"patterns": [".*up.*"], "partition_type": "skip"}]}
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": section,
        "gradient_clipping": 0.0,
        **({dtype: {"enabled": True}} if dtype else {}),
    }
    split = tp_model_init(model, tp_size=2, config=config, inputs={"input_ids": of_step(0, 0)})
    engine = hf_zero.initialize(model=split, config=config, optimizer=torch.optim.SGD(model.parameters(), 0.1))[0]
    errors = []
    for step in range(STEPS):
        engine.backward(loss_of(engine, of_step(step, ranks.rank() // 2), step))
        try:
            engine.step()
            errors.append("")
        except StateError as error:
            errors.append(str(error))
            engine.zero_grad()
    weights = {name: param.detach().float().clone() for name, param in hf_zero.utils.iter_full_params(engine)}
    engine.destroy()
    return errors, weights


def by_one_process(loss_of: Callable[[Any, torch.Tensor, int], torch.Tensor], groups: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        for group in range(groups):
            (loss_of(model, of_step(step, group), step) / groups).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize(("stage", "dtype", "world"), [(1, "", 2), (3, "", 4), (2, "bf16", 2)])
@pytest.mark.parametrize("loss_of", [branch, outside])
def test_parts_in_a_loss_are_an_error_on_all_ranks(loss_of: Any, stage: int, dtype: str, world: int) -> None:
    """The vote of the step after the first one with different losses refuses."""
    for errors, _ in ranks.run_ranks(_trained, world, loss_of, stage, False, dtype):
        found = "different inputs of divided layers" if loss_of is branch else "different losses"
        assert errors[:2] == ["", ""] and found in errors[2] and "'skip'" in errors[2], errors


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 4)])
@pytest.mark.parametrize("loss_of", [plain, branch, outside])
def test_a_whole_layer_trains_as_in_one_process(loss_of: Any, stage: int, world: int) -> None:
    wanted = by_one_process(loss_of, world // 2)
    for errors, weights in ranks.run_ranks(_trained, world, loss_of, stage, loss_of is not plain, ""):
        assert errors == [""] * STEPS
        for name, weight in wanted.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)
