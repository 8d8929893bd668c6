"""Kinds of a script's optimizer: composed of features, with methods of its own, around another one, or a subclass of one of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.optim.composed import RATE, Composed
from tests.optim.composed_options import Drawn

Groups = list[dict[str, Any]]


class Methods(Composed):
    """A composed optimizer that overrides methods of its base."""


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    for group in self.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()


def _state_dict(self: Any) -> dict[str, Any]:
    return {**torch.optim.Optimizer.state_dict(self), "count": self.count}


def _load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
    state_dict = dict(state_dict)
    self.count = state_dict.pop("count", self.count)
    torch.optim.Optimizer.load_state_dict(self, state_dict)


def _add_param_group(self: Any, param_group: dict[str, Any]) -> None:
    torch.optim.Optimizer.add_param_group(self, {**param_group, "scale": 1.5})


def _setstate(self: Any, state: dict[str, Any]) -> None:
    torch.optim.Optimizer.__setstate__(self, state)
    for group in self.param_groups:
        group.setdefault("lr", RATE)


def _needs_closure(self: Any, closure: Callable[[], Any]) -> Any:
    return Composed.step(self, closure)


METHODS: dict[str, dict[str, Any]] = {
    "zero_grad": {"zero_grad": _zero_grad},
    "state_dict": {"state_dict": _state_dict},
    "load_state_dict": {"state_dict": _state_dict, "load_state_dict": _load_state_dict},
    "add_param_group": {"add_param_group": _add_param_group},
    "setstate": {"__setstate__": _setstate},
    "closure first": {"step": _needs_closure},
}


class Lookahead(torch.optim.Optimizer):
    """Slow weights around another optimizer, whose groups it shares or copies."""

    def __init__(self, inner: torch.optim.Optimizer, apart: bool = False) -> None:
        self.inner = inner
        groups = [{"params": list(group["params"])} for group in inner.param_groups] if apart else inner.param_groups
        super().__init__(groups, {"every": 2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                if "slow" not in state:
                    state["slow"] = param.detach().clone()
                if group["count"] % group["every"] == 0:
                    state["slow"].lerp_(param, 0.5)
                    param.copy_(state["slow"])
        return loss


class Several(torch.optim.Optimizer):
    """Two optimizers in one: matrices have another one than vectors."""

    def __init__(self, *each: torch.optim.Optimizer) -> None:
        self.each = each
        super().__init__([param for one in each for group in one.param_groups for param in group["params"]], {})
        self.param_groups = [group for one in each for group in one.param_groups]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for one in self.each:
            one.step()
        return loss


class Sam(torch.optim.Optimizer):
    """Sharpness-aware steps: the gradient of a step is that of weights which the first half of the step has moved."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["old"] = param.data.clone()
                    param.add_(param.grad * group["rho"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = self.state[param]["old"]
        self.base.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM needs a closure"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class OwnAdam(torch.optim.AdamW):
    """torch's AdamW with work around its step."""

    def __init__(self, params: Any, lr: float = RATE, factor: float = 1.0) -> None:
        super().__init__(params, lr=lr, eps=0.1)
        self.factor = factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        before = [param.detach().clone() for group in self.param_groups for param in group["params"]]
        loss = super().step(closure)
        for param, value in zip((param for group in self.param_groups for param in group["params"]), before, strict=True):
            param.lerp_(value, 0.25 * self.factor)
        return loss


_ADAM = {"lr": RATE, "eps": 0.1}
TORCH: dict[str, dict[str, Any]] = {
    "AdamW foreach": {**_ADAM, "foreach": True},
    "AdamW amsgrad": {**_ADAM, "amsgrad": True},
    "AdamW maximize": {**_ADAM, "lr": 1e-3, "maximize": True},
    "AdamW tensor": {"eps": 0.1},
    "AdamW fused": {**_ADAM, "fused": True},
    "Adam decoupled": {**_ADAM, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "Adam differentiable": {**_ADAM, "foreach": False, "weight_decay": 0.1},
    "Adam decay": {**_ADAM, "weight_decay": 0.1, "betas": (0.5, 0.7)},
    "SGD nesterov": {"lr": RATE, "momentum": 0.8, "nesterov": True},
    "SGD dampening": {"lr": RATE, "momentum": 0.8, "dampening": 0.5, "weight_decay": 0.1},
    "SGD plain": {"lr": RATE},
    "SGD fused": {"lr": RATE, "momentum": 0.8, "fused": True},
    "RMSprop centered": {"lr": RATE / 10, "centered": True, "momentum": 0.5, "eps": 0.1},
    "Adagrad": {"lr": RATE, "initial_accumulator_value": 0.1, "lr_decay": 0.1},
    "Adadelta": {"lr": RATE, "eps": 0.1},
    "Adamax": {**_ADAM},
    "NAdam": {**_ADAM},
    "NAdam decoupled": {**_ADAM, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {**_ADAM},
    "ASGD": {"lr": RATE, "t0": 2, "lambd": 0.1},
    "Rprop": {"lr": 1e-3},
    "Adafactor": {"lr": RATE / 5},
    "Muon": {"lr": RATE},
}


def _of_torch(run: Drawn, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    name = run["torch"]
    options = {**TORCH[name], **({"lr": torch.tensor(RATE)} if name == "AdamW tensor" else {})}
    if name == "Muon":
        return torch.optim.Muon([param for _, param in named if param.ndim == 2], **options)
    groups = groups_of(run, named)
    for group in groups if isinstance(groups, list) and isinstance(groups[0], dict) else ():
        group.pop("beta", None)
        if isinstance(options["lr"], torch.Tensor):
            group.pop("lr", None)
    made: torch.optim.Optimizer = getattr(torch.optim, name.split()[0])(groups, **options)
    return made


def groups_of(run: Drawn, named: list[tuple[str, nn.Parameter]]) -> Any:
    """Return the first argument of the optimizer."""
    kind, params = run["groups"], [param for _, param in named]
    if kind == "one":
        return iter(params)
    if kind == "each":
        return [{"params": [param]} for param in params]
    if kind == "named":
        return named
    matrices, vectors = [param for param in params if param.ndim > 1], [param for param in params if param.ndim <= 1]
    more: dict[str, Any] = {
        "extra key": {"scale": 0.5, "tag": "vectors"},
        "rates": {"lr": RATE / 2, "beta": 0.5},
        "rules": {"rule": "adam"},
    }.get(kind, {})
    if run["kind"] in ("adam", "sam"):
        more = {key: value for key, value in more.items() if key not in ("beta", "rule")}
    return [{"params": matrices}, {"params": vectors, **more}]


def make(run: Drawn, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the optimizer of ``run`` over these parameters."""
    base: Any = type("Drawn", (Methods,), {"run": run, **METHODS.get(run["methods"] or "", {})})
    kind = run["kind"]
    if kind == "sam":
        return Sam(groups_of(run, named), torch.optim.SGD, lr=RATE, momentum=0.5)
    if kind == "torch":
        return _of_torch(run, named)
    if kind == "adam":
        return OwnAdam(groups_of(run, named), factor=1.0)
    if kind == "several":
        matrices, vectors = [param for _, param in named if param.ndim > 1], [param for _, param in named if param.ndim <= 1]
        return Several(base(matrices, rule=run["rule"]), torch.optim.AdamW(vectors, lr=RATE, eps=0.1))
    made: torch.optim.Optimizer = base(groups_of(run, named), rule=run["rule"])
    return Lookahead(made, kind == "lookahead apart") if kind else made
