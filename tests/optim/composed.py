"""Optimizers composed of features, as scripts write them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.optim.composed_options import Drawn

RATE = 0.05


def _direction(rule: str, grad: Tensor, param: Tensor, state: dict[str, Any], count: int, beta: float) -> Tensor:
    """Return the update of a parameter for its gradient; ``count`` is the number of this step, from 1."""
    if rule == "sgd":
        return grad.clone()
    if rule == "centered":
        grad = grad - grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True) if grad.ndim > 1 else grad
    if rule == "factored" and grad.ndim > 1:
        for name, dim in (("rows", -1), ("columns", -2)):
            mean = grad.square().mean(dim) + 1e-3
            state[name] = mean if name not in state else state[name].lerp_(mean, 1 - beta)
        return grad / (state["rows"][..., None] * state["columns"][..., None, :] / state["rows"].mean()).sqrt()
    if rule in ("adam", "rms", "factored", "adan"):
        square = _buffer(state, "square", param).mul_(beta).addcmul_(grad, grad, value=1 - beta)
        if rule == "rms":
            return grad / (square.sqrt() + 0.1)
        moment = _buffer(state, "moment", param).lerp_(grad, 0.2)
        if rule == "adan":
            before = state.get("before")
            moment = moment if before is None else moment + 0.5 * (grad - before)
            state["before"] = grad.clone()
        return moment / (1 - 0.8**count) / ((square / (1 - beta**count)).sqrt() + 0.1)
    if rule == "sign":
        moment = _buffer(state, "moment", param)
        mixed = moment * beta + grad * (1 - beta)
        moment.lerp_(grad, 0.1)
        return mixed / (mixed.abs() + 1e-2)
    if rule == "dual":
        total = _buffer(state, "total", param).add_(grad)
        if "start" not in state:
            state["start"] = param.detach().clone()
        return (param - (state["start"] - 0.1 * total)) * 0.7
    moment = _buffer(state, "moment", param).mul_(beta).add_(grad)
    if rule == "trust":
        return moment * (param.norm() + 0.1) / (moment.norm() + 0.1)
    if rule == "clipped":
        return moment / max(1.0, float(moment.square().mean().sqrt()) / 0.05)
    if rule == "orthogonal" and moment.ndim == 2:
        matrix = moment / (moment.norm() + 1e-3)
        return 1.5 * matrix - 0.5 * matrix @ matrix.T @ matrix
    return moment.clone()


def _buffer(state: dict[str, Any], name: str, param: Tensor) -> Tensor:
    if name not in state:
        state[name] = torch.zeros_like(param)
    found: Tensor = state[name]
    return found


def _more(kind: str | None, state: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor | float:
    """Keep one more state; return a factor of the update that depends on it."""
    if kind is None:
        return 1.0
    if "more" not in state:
        state["more"] = {
            "nested": {"a": {"b": torch.zeros_like(param)}, "n": 0},
            "list": [torch.zeros_like(param), 0],
            "tuple": (torch.zeros_like(param), 0),
            "text": "begun",
            "none": None,
            "float": 0.0,
            "scalar": torch.zeros(()),
            "flag": torch.zeros(1, dtype=torch.bool),
            "double": torch.zeros_like(param, dtype=torch.float64),
            "half": torch.zeros_like(param, dtype=torch.bfloat16),
            "bytes": torch.zeros_like(param, dtype=torch.uint8),
            "column": torch.zeros(param.shape[0] if param.ndim else 1),
        }[kind]
    more = state["more"]
    if kind == "nested":
        more["n"] += 1
        return 1 + 0.1 * more["n"] + more["a"]["b"].add_(grad.abs())
    if kind in ("list", "tuple"):
        total = more[0].add_(grad.abs())
        state["more"] = type(more)((total, more[1] + 1))
        return 1 + 0.1 * state["more"][1] + total
    if kind in ("text", "none"):
        fresh = more in ("begun", None)
        state["more"] = "going" if kind == "text" else 1
        return 2.0 if fresh else 1.0
    if kind == "float":
        state["more"] = more + 0.25
        return 1 + state["more"]  # type: ignore[no-any-return]
    if kind == "scalar":
        return 1 + more.add_(0.25)  # type: ignore[no-any-return]
    if kind == "flag":
        more.logical_not_()
        return 1.0 + float(more)  # type: ignore[no-any-return]
    if kind == "bytes":
        return 1 + 0.1 * more.add_(1).to(grad.dtype)  # type: ignore[no-any-return]
    if kind == "column":
        sums = grad.abs().flatten(1).sum(1) if grad.ndim > 1 else grad.abs().reshape(-1)
        more.add_(sums)
        return 1 + more.view(-1, *[1] * (grad.ndim - 1)) if grad.ndim else 1 + more[0]
    return 1 + more.add_(grad.abs().round(decimals=2)).to(grad.dtype)  # type: ignore[no-any-return]


class Helper:
    """An object of a script that counts steps."""

    def __init__(self) -> None:
        self.steps = 0


class Composed(torch.optim.Optimizer):
    """An optimizer with the features of ``run``, an attribute of its class."""

    run: Drawn

    def __init__(self, params: Any, lr: float = RATE, beta: float = 0.8, rule: str = "sgd") -> None:
        run = self.run
        defaults = {"lr": lr, "beta": beta}
        if run["argument"] == "defaults":
            defaults["rule"] = rule
        elif run["argument"] == "attribute":
            self.rule = rule
        self.count = 0
        self.counts: Any = {"list": [0], "table": {"of": {"steps": 0}}, "tensor": torch.zeros(()), "helper": Helper()}.get(run["counter"])
        params = list(params)
        if run["methods"] == "no super":
            self.defaults, self.state = defaults, defaultdict(dict)
            self.param_groups = [
                {**defaults, **(group if isinstance(group, dict) else {"params": [group]})} for group in self._as_groups(params)
            ]
        elif run["defaults"] == "own":
            super().__init__(params, defaults)
        elif run["defaults"] == "keys":
            super().__init__(params, {**defaults, "unknown": [1, 2], "note": None})
        else:
            groups = [{**defaults, **group} for group in self._as_groups(params)]
            super().__init__(groups, {})
        for group in self.param_groups if run["made"] == "init" else ():
            for param in group["params"]:
                self.state[param]["moment"] = torch.zeros_like(param)
                self.state[param]["step"] = 0
        self._keep()

    @staticmethod
    def _as_groups(params: list[Any]) -> list[dict[str, Any]]:
        return [dict(group) for group in params] if params and isinstance(params[0], dict) else [{"params": params}]

    def _keep(self) -> None:
        """Keep parameters in attributes, as the feature says."""
        params = [param for group in self.param_groups for param in group["params"]]
        kind = self.run["attribute"]
        self.kept: Any = {
            "list": params,
            "walked": params,
            "by id": {id(param): 1.0 + 0.5 * (index % 2) for index, param in enumerate(params)},
            "by param": {param: 1.0 + 0.5 * (index % 2) for index, param in enumerate(params)},
            "buffers by param": {},
            "buffers by id": {},
            "buffers by index": [],
            "names": {param: f"p{index}" for index, param in enumerate(params)},
            "numel": sum(param.numel() for param in params),
            "groups": self.param_groups,
        }.get(kind)

    # -- one step

    def _pairs(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        if self.run["attribute"] == "walked":
            yield from ((self.param_groups[0], param) for param in self.kept if param.grad is not None)
            return
        for group in self.kept if self.run["attribute"] == "groups" else self.param_groups:
            yield from ((group, param) for param in group["params"] if param.grad is not None)

    def _count_all(self) -> int:
        """Count this step where one number serves all parameters."""
        kind = self.run["counter"]
        if kind == "attribute":
            self.count += 1
            return self.count
        if kind == "list":
            self.counts.append(self.counts[-1] + 1)
            return self.counts[-1]  # type: ignore[no-any-return]
        if kind == "table":
            self.counts["of"]["steps"] += 1
            return self.counts["of"]["steps"]  # type: ignore[no-any-return]
        if kind == "tensor":
            return int(self.counts.add_(1))
        if kind == "helper":
            self.counts.steps += 1
            return self.counts.steps  # type: ignore[no-any-return]
        if kind == "key":
            state: Any = self.state
            state["k"] = state.get("k", 0) + 1
            return state["k"]  # type: ignore[no-any-return]
        if kind == "first state":
            params = [param for group in self.param_groups for param in group["params"]]
            if not params:
                return 1
            state = self.state[params[0]]
            state["step"] = state.get("step", 0) + 1
            return state["step"]  # type: ignore[no-any-return]
        for group in self.param_groups if kind == "group" else self.param_groups[:1]:
            group["count"] = group.get("count", 0) + 1
        return self.param_groups[0]["count"]  # type: ignore[no-any-return]

    def _count_one(self, state: dict[str, Any], count: int) -> int:
        kind = self.run["counter"]
        if kind == "none":
            return 1
        if kind == "state int":
            state["step"] = state.get("step", 0) + 1
            return state["step"]  # type: ignore[no-any-return]
        if kind == "state tensor":
            return int(state.setdefault("step", torch.tensor(0.0)).add_(1))
        return count

    def _gradient(self, group: dict[str, Any], param: nn.Parameter, factor: float) -> Tensor:
        run = self.run
        assert param.grad is not None
        if run["grad"] == "replaces":
            param.grad = param.grad * 1.0
        grad = param.grad.clone() if run["grad"] == "clones" else param.grad.data if run["grad"] == "data" else param.grad
        if run["grad"] == "in place":
            grad.mul_(1.1)
        if factor != 1.0:
            grad = grad * factor
        if run["decay"] == "coupled":
            grad = grad.add_(param, alpha=0.1) if run["grad"] == "in place" and factor == 1.0 else grad.add(param, alpha=0.1)
        return grad

    def _factor(self, pairs: list[tuple[dict[str, Any], nn.Parameter]], rule: str) -> float:
        grads = [param.grad for _, param in pairs if param.grad is not None]
        if rule == "global":
            return float(1.0 / (1e-2 + torch.stack([grad.norm() for grad in grads]).norm())) if grads else 1.0
        if rule == "mean":
            return float(torch.cat([grad.flatten() for grad in grads]).abs().mean()) * 20 if grads else 1.0
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        run = self.run
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = list(self._pairs())
        count = 1 if run["counter"] in ("none", "state int", "state tensor") else self._count_all()
        rule = self.run["rule"] if run["argument"] == "class" else self.rule if run["argument"] == "attribute" else ""
        rules = [rule or group["rule"] for group, _ in pairs]
        factor = self._factor(pairs, rules[0] if rules else "sgd")
        updates = []
        if run["decay"] == "foreach" and pairs:
            torch._foreach_mul_([param for _, param in pairs], 0.99)
        for index, ((group, param), name) in enumerate(zip(pairs, rules, strict=True)):
            grad, state = self._gradient(group, param, factor), self._state_of(param, index)
            number = self._count_one(state, count)
            if run["decay"] == "decoupled":
                param.data.mul_(1 - group["lr"] * 0.1)
            update = _direction(name, grad, param, state, number, group["beta"]) * _more(run["more state"], state, param, grad)
            if run["attribute"] in ("by id", "by param"):
                update = update * (self.kept[id(param)] if run["attribute"] == "by id" else self.kept[param])
            if run["attribute"] == "numel":
                update = update * (self.kept / 200)
            if run["attribute"] == "names":
                update = update * (1.5 if self.kept[param] == "p0" else 1.0)
            updates.append(update * (group["lr"] / number**0.5 * group.get("scale", 1.0)))
        self._write([param for _, param in pairs], updates)
        for _, param in pairs:
            if run["grad"] == "drops":
                param.grad = None
            if run["grad"] == "zeroes" and param.grad is not None:
                param.grad.zero_()
        return loss if run["methods"] != "returns" else {"loss": loss, "count": count}

    def _state_of(self, param: nn.Parameter, index: int) -> dict[str, Any]:
        kind = self.run["attribute"]
        if kind == "buffers by param":
            return self.kept.setdefault(param, {})  # type: ignore[no-any-return]
        if kind == "buffers by id":
            return self.kept.setdefault(id(param), {})  # type: ignore[no-any-return]
        if kind == "buffers by index":
            if len(self.kept) <= index:
                self.kept.append({})
            return self.kept[index]  # type: ignore[no-any-return]
        state = self.state[param]
        if self.run["made"] == "empty test" and len(state) == 0:
            state["moment"], state["made"] = torch.zeros_like(param), 1
        if self.run["made"] == "setdefault":
            state.setdefault("moment", torch.zeros_like(param, memory_format=torch.preserve_format))
        return state

    def _write(self, params: list[nn.Parameter], updates: list[Tensor]) -> None:
        kind = self.run["write"]
        if kind == "foreach":
            if params:
                torch._foreach_sub_(params, updates)
            return
        if kind == "flat":
            if params:
                flat = torch._utils._flatten_dense_tensors([param.data for param in params])
                flat.sub_(torch._utils._flatten_dense_tensors(updates))
                for param, value in zip(params, torch._utils._unflatten_dense_tensors(flat, params), strict=True):
                    param.data.copy_(value)
            return
        for param, update in zip(params, updates, strict=True):
            if kind == "data":
                param.data = param.data - update
            elif kind == "data sub":
                param.data.sub_(update)
            elif kind == "copy":
                param.data.copy_(param.data - update)
            elif kind == "set":
                param.set_(param - update)  # type: ignore[call-overload]
            elif kind == "addcdiv":
                param.addcdiv_(update, torch.ones_like(update), value=-1.0)
            elif kind == "lerp":
                param.lerp_(param - update, 1.0)
            elif kind == "swap":
                other = self.state[param].setdefault("other", param.detach().clone())
                other.copy_(param - update)
                self.state[param]["other"], param.data = param.data, other
            elif kind == "slices":
                param.view(-1)[:] -= update.reshape(-1)
            elif kind == "numpy":
                param.data.numpy()[...] -= update.numpy()
            elif kind == "temporary":
                values = param.data
                param.data = values.clone()
                param.data.sub_(update)
            else:
                param.sub_(update)
