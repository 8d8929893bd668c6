"""Reference of 1-bit Adam in one process with N simulated workers, in plain torch.

Written from Algorithm 1 of Tang et al., "1-bit Adam" (arXiv 2102.02888): Adam for ``freeze_step`` steps; then each worker adds its gradient
to the common momentum and encodes the sum plus its earlier quantization error, and a server encodes the average of the codes in the same
way. It uses nothing of the engine except the layout of the parameters: one scale belongs to up to 1024 elements of one parameter, inside
one of the N equal parts (a multiple of 16 elements long) that a flat unit is divided into.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 1024
ALIGN = 16
Lossy = Callable[[nn.Module, int, int], Tensor]  # (model, step, worker) -> loss
Places = list[list[tuple[str, int, int]]]  # per unit: name, first element, elements


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters; ``steps`` is the total number of steps."""

    workers: int
    steps: int
    freeze_step: int
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-3
    weight_decay: float = 0.05
    bias_correction: bool = True
    max_norm: float = 0.0
    accumulation: int = 1


@dataclass
class Outcome:
    """Mean loss per step, norm per step, and the state at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    worker_errors: list[dict[str, Tensor]] = field(default_factory=list)
    server_error: dict[str, Tensor] = field(default_factory=dict)


def chunk_cuts(places: Places, workers: int) -> dict[str, list[int]]:
    """Return for each parameter the lengths of its chunks, in order."""
    cuts: dict[str, list[int]] = {}
    for unit in places:
        end = max(_up(offset + numel, ALIGN) for _, offset, numel in unit)
        part = _up(math.ceil(end / workers), ALIGN)
        for name, offset, numel in unit:
            position, lengths = offset, []
            while position < offset + numel:
                stop = min(offset + numel, (position // part + 1) * part)
                lengths += [min(CHUNK, stop - start) for start in range(position, stop, CHUNK)]
                position = stop
            cuts[name] = lengths
    return cuts


def _up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def code(values: Tensor, lengths: list[int]) -> Tensor:
    """Return the values that a receiver decodes from the code of ``values``: signs times the mean magnitude of each chunk."""
    seen = []
    for chunk in values.flatten().split(lengths):
        scale = (chunk.abs().double().sum() / chunk.numel()).float()
        seen.append(torch.where(chunk >= 0, scale, -scale))
    return torch.cat(seen).view(values.shape) if seen else values.clone()


class Reference:
    """The algorithm over named parameters."""

    def __init__(self, model: nn.Module, settings: Settings, places: Places) -> None:
        self.settings = settings
        self.params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.lengths = chunk_cuts(places, settings.workers)
        # torch's Adam and matrix products round a vector's last elements in their own way, so parameters lie as the engine lays them.
        self.flats = [nn.Parameter(torch.zeros(max(offset + numel for _, offset, numel in unit))) for unit in places]
        self.views = {name: (flat, offset, numel) for flat, unit in zip(self.flats, places, strict=True) for name, offset, numel in unit}
        for name, param in self.params.items():
            view = self._view(self.views[name][0].data, name)
            param.data = view.copy_(param.data)
        self.adam = torch.optim.AdamW(
            self.flats, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=True
        )
        self.step_count = 0
        self.momentum: dict[str, Tensor] = {}
        self.variance: dict[str, Tensor] = {}
        self.worker_errors = [self._zeros() for _ in range(settings.workers)]
        self.server_error = self._zeros()

    def _view(self, flat: Tensor, name: str) -> Tensor:
        _, offset, numel = self.views[name]
        return flat[offset : offset + numel].view(self.params[name].shape)

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(param) for name, param in self.params.items()}

    @torch.no_grad()
    def step(self, gradients: list[dict[str, Tensor]]) -> float:
        """Take one step with each worker's gradients; return the norm that was clipped."""
        self.step_count += 1
        if self.step_count <= self.settings.freeze_step:
            return self._warm_up(gradients)
        squares = [sum(grad.double().square().sum().item() for grad in worker.values()) for worker in gradients]
        norm = math.sqrt(sum(squares) / len(squares))
        factor = self._clip(norm)
        for name, param in self.params.items():
            self._compressed(name, param, [worker[name] * factor if factor != 1.0 else worker[name] for worker in gradients])
        return norm

    def _clip(self, norm: float) -> float:
        limit = self.settings.max_norm
        return torch.clamp(limit / (torch.tensor(norm) + 1e-6), max=1.0).item() if limit else 1.0

    def _warm_up(self, gradients: list[dict[str, Tensor]]) -> float:
        for flat in self.flats:
            flat.grad = torch.zeros_like(flat)
        for name in self.params:
            total = gradients[0][name] * (1 / len(gradients))
            for worker in gradients[1:]:
                total = total + worker[name] * (1 / len(gradients))
            self._view(self.views[name][0].grad, name).copy_(total)
        norm = math.sqrt(sum(flat.grad.double().square().sum().item() for flat in self.flats))
        factor = self._clip(norm)
        for flat in self.flats:
            if factor != 1.0:
                flat.grad *= factor
        self.adam.step()
        for name in self.params:
            state = self.adam.state[self.views[name][0]]
            self.momentum[name], self.variance[name] = (self._view(state[key], name) for key in ("exp_avg", "exp_avg_sq"))
        return norm

    def _compressed(self, name: str, param: Tensor, gradients: list[Tensor]) -> None:
        settings, lengths = self.settings, self.lengths[name]
        beta1, beta2 = settings.betas
        received = torch.zeros_like(param)
        for worker, grad in enumerate(gradients):
            momentum = self.momentum[name] * beta1 + grad * (1 - beta1)
            compensated = momentum + self.worker_errors[worker][name]
            sent = code(compensated, lengths)
            self.worker_errors[worker][name] = compensated - sent
            received = received + sent
        compensated = received / settings.workers + self.server_error[name]
        self.momentum[name] = code(compensated, lengths)
        self.server_error[name] = compensated - self.momentum[name]
        first = 1 - beta1**self.step_count
        second = math.sqrt(1 - beta2**settings.freeze_step)
        root = self.variance[name].double().sqrt().float()  # torch's root in single precision is not always the nearest number
        direction = self.momentum[name] / (root / second + settings.eps)
        param.mul_(1 - settings.lr * settings.weight_decay)
        param.add_(direction * (-settings.lr / first))


def run(model: nn.Module, loss_of: Callable[[nn.Module, int, int, int], Tensor], settings: Settings, places: Places) -> Outcome:
    """Train ``model``; the loss is ``loss_of(model, step, micro-step, worker)``."""
    reference = Reference(model, settings, places)
    outcome = Outcome()
    for step in range(settings.steps):
        losses, gradients = [], []
        for worker in range(settings.workers):
            grads: dict[str, Any] = {}
            for micro in range(settings.accumulation):
                loss = loss_of(model, step, micro, worker)
                losses.append(loss.item())
                (loss / settings.accumulation if settings.accumulation > 1 else loss).backward()
                for name, param in reference.params.items():
                    fresh = param.grad if param.grad is not None else torch.zeros_like(param)
                    grads[name] = fresh.clone() if name not in grads else grads[name] + fresh
                    param.grad = None
            gradients.append(grads)
        outcome.losses.append(math.fsum(losses) / len(losses))
        outcome.norms.append(reference.step(gradients))
    outcome.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    outcome.worker_errors, outcome.server_error = reference.worker_errors, reference.server_error
    return outcome
