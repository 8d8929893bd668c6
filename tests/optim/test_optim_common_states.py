"""Optimizers that keep a state for all parameters together, such as MADGRAD's count of steps: plain PyTorch's numbers, also resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import CheckpointError
from tests.support import ranks


class Counting(torch.optim.Optimizer):
    """Momentum with a rate that falls with the steps, which the optimizer counts under a key of ``state`` that is no parameter."""

    def __init__(self, params: Any, lr: float = 0.3, kind: str = "tensor") -> None:
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: Any = self.state
        if "k" not in state:
            state["k"] = torch.tensor([0]) if self.kind == "tensor" else {"steps": 0}
        steps = state["k"] if self.kind == "tensor" else state["k"]["steps"]
        count = (max(steps) if isinstance(steps, set) else int(steps)) + 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                    param.sub_(moment, alpha=group["lr"] / count)
        if self.kind == "tensor":
            state["k"] += 1
        else:
            state["k"]["steps"] = count if self.kind == "dict" else {count}


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2))


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def _engine(kind: str, zero: dict[str, Any]) -> Any:
    model = _model()
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero}
    return hf_zero.initialize(model=model, optimizer=Counting(model.parameters(), kind=kind), config=config)[0]


def _steps(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(_loss(engine, step, ranks.rank()))
        engine.step()


def _plain(kind: str, steps: int) -> list[torch.Tensor]:
    model = _model()
    optimizer = Counting(model.parameters(), kind=kind)
    for step in range(steps):
        for rank in range(ranks.world()):
            (_loss(model, step, rank) / ranks.world()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def _counts_once(folder: str, kind: str, zero: dict[str, Any]) -> None:
    """Train, resume in a new engine, train, go back to the beginning, and train again."""
    engine = _engine(kind, zero)
    engine.save_checkpoint(folder, tag="start")
    _steps(engine, 0, 3)
    engine.save_checkpoint(folder, tag="middle")
    engine.destroy()
    engine = _engine(kind, zero)
    engine.load_checkpoint(folder, tag="middle")
    _steps(engine, 3, 5)
    _compare(engine, _plain(kind, 5))
    engine.load_checkpoint(folder, tag="start")
    _steps(engine, 0, 2)
    _compare(engine, _plain(kind, 2))
    engine.destroy()


def _compare(engine: Any, wanted: list[torch.Tensor]) -> None:
    for param, plain in zip(engine.parameters(), wanted, strict=True):
        with hf_zero.zero.GatheredParameters(param):
            torch.testing.assert_close(param.detach(), plain, rtol=1e-5, atol=1e-6)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CELLS = [
    ("tensor", {"stage": 0}), ("dict", {"stage": 1}), ("tensor", {"stage": 1}), ("tensor", {"stage": 2, **OFFLOAD}), ("dict", {"stage": 3})
]  # fmt: skip


@pytest.mark.parametrize(("kind", "zero"), CELLS, ids=str)
def test_a_state_of_all_parameters_is_kept_once_and_saved(tmp_path: Path, kind: str, zero: dict[str, Any]) -> None:
    ranks.run_ranks(_counts_once, 2, str(tmp_path), kind, zero)


def _cannot_be_saved(folder: str) -> None:
    engine = _engine("set", {"stage": 1})
    _steps(engine, 0, 1)
    with pytest.raises(CheckpointError, match=r"optimizer.state\['k'\]\['steps'\] is a set, expected a tensor or a number"):
        engine.save_checkpoint(folder)
    engine.destroy()


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    ranks.run_ranks(_cannot_be_saved, 2, str(tmp_path))


class InPlace(torch.optim.Optimizer):
    """A rate that falls with the steps, counted in an attribute or an option of the group that the step changes in place."""

    def __init__(self, params: Any, where: str = "table") -> None:
        super().__init__(params, {"lr": 0.3, "count": torch.zeros(())})
        self.where, self.table, self.tensor, self.past = where, {"of": {"k": 0}}, torch.zeros(()), [0.0]

    def _count(self) -> float:
        """Count this step, and return its number."""
        if self.where == "table":
            self.table["of"]["k"] += 1
            return float(self.table["of"]["k"])
        if self.where == "list":
            self.past.append(self.past[-1] + 1)
            return self.past[-1]
        return float((self.tensor if self.where == "tensor" else self.param_groups[0]["count"]).add_(1))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count = self._count()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / count)


def _counts_in_place(where: str) -> None:
    for stage in (1, 2, 3):
        plain, model = _model(), _model()
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 40, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero}
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        own = InPlace(model.parameters(), where)
        engine, optimizer = hf_zero.initialize(model=model, optimizer=own, config=config)[0], InPlace(plain.parameters(), where)
        _steps(engine, 0, 3)
        for step in range(3):
            for rank in range(ranks.world()):
                (_loss(plain, step, rank) / ranks.world()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with hf_zero.zero.GatheredParameters(list(model.parameters())):
            for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found, expected)
        counted = engine.optimizer.inner
        assert (counted.table["of"]["k"], counted.past[-1], float(counted.tensor)) == {
            "table": (3, 0.0, 0.0), "list": (0, 3.0, 0.0), "tensor": (0, 0.0, 3.0), "group": (0, 0.0, 0.0)
        }[where]  # fmt: skip
        engine.destroy()


@pytest.mark.parametrize("where", ["table", "list", "tensor", "group"])
def test_a_count_that_a_step_changes_in_place_is_counted_once_with_sub_groups(where: str) -> None:
    ranks.run_ranks(_counts_in_place, 2, where)
