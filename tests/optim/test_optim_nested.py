"""Optimizers that step another one, or are made without ``Optimizer.__init__``: plain PyTorch's numbers, also resumed; or an error."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.core.optimizer import nested
from hf_zero.errors import ConfigError, StateError
from tests.support import ranks

Params = list[nn.Parameter]


class Lookahead(torch.optim.Optimizer):
    """Lookahead in the usual form: no ``Optimizer.__init__``, and all state in the inner optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group.setdefault("count", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.inner.param_groups:
            group["count"] += 1
            for param in group["params"] if group["count"] % 2 == 0 else ():
                slow = self.inner.state[param].setdefault("slow", param.detach().clone())
                slow.lerp_(param, 0.5)
                param.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
        self.param_groups = self.inner.param_groups


class Several(torch.optim.Optimizer):
    """Two optimizers in one."""

    def __init__(self, *each: torch.optim.Optimizer) -> None:
        self.each = list(each)
        super().__init__([param for one in each for group in one.param_groups for param in group["params"]], {})
        self.param_groups = [group for one in each for group in one.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.each:
            one.step()


class Around(torch.optim.Optimizer):
    """An optimizer around another one, with the state or the groups that the arguments say."""

    def __init__(self, inner: torch.optim.Optimizer, name: str = "", own_groups: bool = False, slow: bool = False) -> None:
        self.inner, self.name = inner, name
        groups = [{"params": list(group["params"])} for group in inner.param_groups] if own_groups else inner.param_groups
        super().__init__(groups, {"lr": 0.1})
        self.slow = [[param.detach().clone() for param in group["params"]] for group in groups] if slow else []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups if self.name else ():
            for param in group["params"]:
                self.state[param][self.name] = param.detach().clone()


def _adamw(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 0.05, eps=1e-3)


MADE: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "lookahead": lambda params: Lookahead(_adamw(params)),
    "several": lambda params: Several(_adamw(params[:4]), torch.optim.SGD(params[4:], 0.1, momentum=0.9)),
    "around": lambda params: Around(_adamw(params), name="last"),
    "apart": lambda params: Around(_adamw(params), name="last", own_groups=True),
}


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2))


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def _engine(make: Callable[[Params], torch.optim.Optimizer], zero: dict[str, Any]) -> Any:
    model = _model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    return hf_zero.initialize(model=model, optimizer=make(list(model.parameters())), config=config)[0]


def _steps(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(_loss(engine, step, ranks.rank()))
        engine.step()


def _plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for rank in range(ranks.world()):
            (_loss(model, step, rank) / ranks.world()).backward()
        optimizer.step()
        model.zero_grad()


def _compare(engine: Any, make: Callable[[Params], torch.optim.Optimizer], steps: int) -> None:
    model = _model()
    _plain_steps(model, make(list(model.parameters())), 0, steps)
    _assert_same(engine, model)


def _assert_same(engine: Any, model: nn.Module) -> None:
    for param, plain in zip(engine.parameters(), model.parameters(), strict=True):
        with hf_zero.zero.GatheredParameters(param):
            torch.testing.assert_close(param.detach(), plain.detach(), rtol=1e-5, atol=1e-6)


def _trains_and_resumes(folder: str, name: str, zero: dict[str, Any]) -> None:
    engine = _engine(MADE[name], zero)
    _steps(engine, 0, 3)
    engine.save_checkpoint(folder, tag="middle")
    kept = engine.optimizer.state_dict() if name == "lookahead" else None
    moment = hf_zero.utils.safe_get_full_optimizer_state(engine.module[0].weight, "exp_avg")
    assert moment is not None and moment.shape == (8, 6)
    engine.destroy()
    engine = _engine(MADE[name], zero)
    engine.load_checkpoint(folder, tag="middle")
    if kept is not None:
        engine.optimizer.load_state_dict(kept)
    _steps(engine, 3, 6)
    _compare(engine, MADE[name], 6)
    engine.destroy()


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CELLS = [("lookahead", {"stage": 1}), ("lookahead", {"stage": 2, **OFFLOAD}), ("several", {"stage": 0}), ("several", {"stage": 3})]
CELLS += [("around", {"stage": 1, **OFFLOAD}), ("apart", {"stage": 0}), ("apart", {"stage": 3})]


@pytest.mark.parametrize(("name", "zero"), CELLS, ids=str)
def test_an_optimizer_in_another_trains_and_resumes(tmp_path: Path, name: str, zero: dict[str, Any]) -> None:
    ranks.run_ranks(_trains_and_resumes, 2, str(tmp_path), name, zero)


def _refusals() -> None:
    for make, message in (
        (lambda params: Around(_adamw(params), slow=True), "keeps a tensor for each parameter in its attribute 'slow'"),
        (lambda params: Around(_adamw(params), name="exp_avg"), "both keep a state 'exp_avg' of each parameter"),
    ):
        with pytest.raises(ConfigError, match=message):
            _engine(make, {"stage": 1})


def test_tensors_and_groups_that_the_engine_cannot_follow_are_errors() -> None:
    ranks.run_ranks(_refusals, 2)


def _begins_anew(stage: int) -> None:
    engine = _engine(lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), {"stage": stage})
    _steps(engine, 0, 2)
    with pytest.raises(StateError, match=r"optimizer.state was assigned 1 entries"):
        engine.optimizer.state = {"k": 1}
    engine.optimizer.state = defaultdict(dict)
    _steps(engine, 2, 4)
    model = _model()
    for first in (0, 2):
        _plain_steps(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), first, first + 2)
    _assert_same(engine, model)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_empty_state_that_is_assigned_begins_anew(stage: int) -> None:
    ranks.run_ranks(_begins_anew, 2, stage)


def _own_methods() -> None:
    engine = _engine(MADE["lookahead"], {"stage": 1})
    assert not hasattr(engine.optimizer, "nothing_of_this_name")
    assert "AttributeError" in repr(pytest.raises(AttributeError, getattr, engine.optimizer, "inner_of").type)
    engine.optimizer.inner.first_step = lambda: None
    with pytest.raises(AttributeError, match="engine.optimizer has no 'first_step', an attribute of the Lookahead given to initialize"):
        engine.optimizer.first_step()
    engine.destroy()


def test_a_method_of_the_scripts_optimizer_is_named() -> None:
    ranks.run_ranks(_own_methods, 2)


def test_an_optimizer_is_completed() -> None:
    optimizer = Lookahead(_adamw(list(_model().parameters())))
    nested.complete(optimizer)
    assert optimizer._optimizer_step_pre_hooks == OrderedDict()
