"""Optimizers that need whole tensors, and the same training in plain PyTorch: gradients averaged in rank order, the optimizer over whole
fp32 weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import ranks
from tests.support.models import CASES, ModelCase
from tests.support.parity import DTYPES, Run, Trace, cast_model, initialize, prepare, train

Groups = Callable[[nn.Module], Any]


class RowScaled(torch.optim.Optimizer):
    """A third-party optimizer: a second moment per row, a first moment per element, a counter, and a list of tensors as state."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, beta = self.state[param], group["beta"]
                rows = param.grad.square().mean(dim=tuple(range(1, param.ndim)), keepdim=True) if param.ndim > 1 else param.grad.square()
                if not state:
                    state.update(step=0, momentum=torch.zeros_like(param), rows=[torch.zeros_like(rows)], extent=None)
                    state["turned"] = {"by": torch.arange(6.0).view(2, 3).T, 2: torch.tensor(1.5, dtype=torch.float64)}
                state["step"] += 1
                state["extent"] = float(param.grad.norm())
                state["rows"][0].lerp_(rows, 1 - beta)
                state["momentum"].lerp_(param.grad, 1 - beta)
                param.sub_(group["lr"] * state["momentum"] / (state["rows"][0].sqrt() + 1e-3))


class Prodigy(torch.optim.Optimizer):
    """Optimizer that reads all parameters together: its rate is the ratio of two norms over all of them."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        weights, grads = (sum(float(value.double().square().sum()) for value in values) for values in (params, [p.grad for p in params]))
        for param in params:
            param.sub_(self.param_groups[0]["lr"] * (weights / grads) ** 0.5 * param.grad)


class Positions(torch.optim.Optimizer):
    """Optimizer that divides each gradient by its norm and by the parameter's position in its group, as GrokAdamW does."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for position, param in enumerate(group["params"]):
                if param.grad is not None:
                    param.sub_(group["lr"] / (1 + position) * param.grad / param.grad.norm())


class Momentum8bit(torch.optim.Optimizer):
    """Optimizer with momentum in bytes, with one scale per block of 32 elements of the whole parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                blocks = torch.nn.functional.pad(param.grad.flatten(), (0, -param.numel() % 32)).view(-1, 32)
                if state:
                    blocks = 0.9 * (state["codes"].float() - 128) / 127 * state["scales"] + 0.1 * blocks
                state["scales"] = blocks.abs().amax(dim=1, keepdim=True) + 1e-12
                state["codes"] = (blocks / state["scales"] * 127).round().add(128).to(torch.uint8)
                param.sub_(group["lr"] * blocks.flatten()[: param.numel()].view_as(param).sign())


class Muon(torch.optim.Optimizer):
    """Optimizer like Moonlight's Muon, which LLaMA-Factory and ms-swift have: its constructor marks in ``state`` which parameters are
    matrices for it, and has no argument that takes param groups.
    """

    def __init__(self, lr: float, muon_params: list[Tensor], adamw_params: list[Tensor]) -> None:
        super().__init__([*muon_params, *adamw_params], {"lr": lr})
        for param in [*muon_params, *adamw_params]:
            self.state[param]["use_muon"] = any(param is other for other in muon_params)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                marked = state["use_muon"]  # an error where the mark is lost
                if param.grad is None:
                    continue
                momentum = state.setdefault("momentum", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                param.sub_(group["lr"] * momentum / (momentum.norm() if marked else momentum.abs() + 1e-3))


def marked_muon(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return a ``Muon`` for which every second parameter is marked, whatever its shape."""
    return Muon(1e-2, params[::2], params[1::2])


def matrices(model: nn.Module) -> list[Tensor]:
    """Return the matrices alone; freeze the other parameters."""
    for param in model.parameters():
        param.requires_grad_(param.ndim == 2)
    return everything(model)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups in which matrices decay, and other parameters do not and have another rate; every block has both kinds."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim >= 2], "weight_decay": 0.2},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0, "lr": 5e-3},
    ]


def everything(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.requires_grad]


def transformers_adafactor(params: Any, **settings: Any) -> torch.optim.Optimizer:
    from transformers import Adafactor

    made: torch.optim.Optimizer = Adafactor(params, **settings)
    return made


def lamb(params: Any) -> torch.optim.Optimizer:
    from hf_zero.optim.lamb import Lamb

    return Lamb(params, lr=1e-2, weight_decay=0.1)


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Groups]] = {
    "Adafactor": (lambda params: torch.optim.Adafactor(params, lr=1e-2, weight_decay=0.1), everything),
    "Adafactor groups": (lambda params: torch.optim.Adafactor(params, lr=1e-2), decay_groups),
    "transformers relative step": (lambda params: transformers_adafactor(params, lr=None), everything),
    "transformers fixed rate": (
        lambda params: transformers_adafactor(params, lr=1e-2, scale_parameter=False, relative_step=False, beta1=0.9),
        everything,
    ),
    "RowScaled": (RowScaled, everything),
    "8 bit": (Momentum8bit, everything),
    "LAMB": (lamb, everything),
    "marks": (marked_muon, everything),
}
ALL_TOGETHER = {"Prodigy": (Prodigy, everything), "Positions": (Positions, everything), "Positions groups": (Positions, decay_groups)}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    OPTIMIZERS["Muon"] = (lambda params: torch.optim.Muon(params, lr=1e-2), matrices)


def plain(name: str, case: ModelCase, run: Run, world: int, history: bool = False) -> Trace:
    """Train in plain PyTorch: one rank's batch after another, gradients summed in fp32 in rank order, one step over whole fp32 weights."""
    make, groups_of = (OPTIMIZERS | ALL_TOGETHER)[name]
    dtype = DTYPES[run.dtype]
    model = case.build().to(ranks.device())
    twins = case.build().to(ranks.device())
    masters = dict(twins.named_parameters())
    if dtype != torch.float32:
        cast_model(model, dtype)
        with torch.no_grad():
            for key, param in model.named_parameters():
                masters[key].copy_(param)
    trained = {id(param) for group in _as_groups(groups_of(twins)) for param in group["params"]}
    optimizer = make(groups_of(twins))
    for group in optimizer.param_groups:  # torch's Adafactor divides by the number of elements
        group["params"] = [param for param in group["params"] if param.numel()]
    scale = 2.0**run.scale_power if run.dtype == "fp16" else 1.0
    trace = Trace()
    for step in range(run.steps):
        sums = {key: torch.zeros_like(master) for key, master in masters.items()}
        losses = []
        for micro in range(run.accumulation):
            of_micro: dict[str, Tensor] = {}
            for rank in range(world):
                loss = case.forward(model, prepare(case.rows(step, micro, rank), dtype))
                (loss * (scale / run.accumulation)).backward()
                losses.append(loss.item())
                for key, param in model.named_parameters():
                    if param.grad is not None:
                        part = param.grad.float() * (1.0 / world) if dtype == torch.float32 else param.grad.float()
                        of_micro[key] = of_micro[key] + part if key in of_micro else part
                    param.grad = None
            for key, value in of_micro.items():
                sums[key] += value if dtype == torch.float32 else value * (1.0 / world)
        trace.losses.append(math.fsum(losses) / len(losses))
        squares = [(sums[key] / scale).double().square().sum() for key, master in masters.items() if id(master) in trained]
        norm = math.sqrt(math.fsum(float(square) for square in squares))
        trace.norms.append(norm)
        trace.skipped.append(False)
        factor = min(1.0, run.clip / (norm + 1e-6)) if run.clip else 1.0
        for key, master in masters.items():
            master.grad = sums[key] * (factor / scale) if factor / scale != 1.0 else sums[key]
        optimizer.step()
        if history or run.dtype != "fp32":
            trace.history.append({key: master.detach().clone().cpu() for key, master in masters.items()})
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(masters[key])
    trace.weights = {key: param.detach().cpu() for key, param in model.named_parameters()}
    trace.masters = {key: master.detach().cpu() for key, master in masters.items() if id(master) in trained}
    return trace


def _as_groups(groups: Any) -> list[dict[str, Any]]:
    groups = list(groups)
    return groups if isinstance(groups[0], dict) else [{"params": groups}]


def start(name: str, case: ModelCase, run: Run) -> Any:
    """Return an engine that trains ``case`` with the client optimizer of that name."""
    make, groups_of = (OPTIMIZERS | ALL_TOGETHER)[name]
    model = case.build()
    return initialize(model, run, optimizer=make(groups_of(model)), model_parameters=None)


def through_engine(name: str, case_name: str, run: Run) -> Trace:
    """Train a case through the engine; collective."""
    case = CASES[case_name]
    engine = start(name, case, run)
    trace = train(engine, case.rows, case.forward, run)
    trace.masters = {key: value for key, value in trace.masters.items() if value is not None}
    engine.destroy()
    return trace


def world() -> int:
    return ranks.world()
