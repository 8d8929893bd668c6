"""ZeRO++ in one process with N simulated ranks, in plain torch.

Written from section 3 of Wang et al., "ZeRO++" (arXiv 2306.10209) and Algorithm 1 of Xie et al., "LoCo" (arXiv 2407.04480), with the code
that [Note: the code of a block] defines, one block at a time. It uses only the placement of the engine's parameters: one scale belongs
to up to 256 elements of one of the N equal parts of a flat unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

BLOCK = 256
Lossy = Callable[[nn.Module, int, int, int], Tensor]  # (model, step, micro-step, rank) -> loss
Places = list[tuple[int, list[tuple[str, int, int]]]]  # per unit: padded elements; name, first element, elements


@dataclass(frozen=True)
class Settings:
    """Quantized collectives, and the hyper-parameters. ``keep`` None keeps no error. The ``node`` ranks of each node sum their values
    before these are coded once more and sent to the other nodes; 0 is one hop. Each shard group of ``group`` ranks has a whole set of
    shards; 0 is one group. Units whose position is in ``plain`` are never coded."""

    world: int
    steps: int
    weights: bool = False
    gradients: bool = False
    keep: float | None = None
    reset: int = 1024
    dtype: torch.dtype = torch.bfloat16
    accumulation: int = 1
    max_norm: float = 0.0
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-3
    weight_decay: float = 0.05
    node: int = 0
    group: int = 0
    plain: frozenset[int] = frozenset()

    @property
    def parts(self) -> int:
        """Return the number of parts of a unit."""
        return self.group or self.world


@dataclass
class Outcome:
    """Mean loss and norm per step; masters, and the weights that forward uses, at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)


def code(values: Tensor, bits: int) -> Tensor:
    """Return the values of the code of one part, in fp32."""
    return torch.cat([_code_block(block, bits) for block in values.float().split(BLOCK)])


def _code_block(block: Tensor, bits: int) -> Tensor:
    largest = block.abs().max()
    if not torch.isfinite(largest):
        return torch.full_like(block, math.nan)
    if largest < 2.0**-100:
        return torch.zeros_like(block)
    scale = largest / (127 if bits == 8 else 28)
    quotients = block / scale
    return (torch.round(quotients) if bits == 8 else _steps(quotients)).add(0.0) * scale


def _steps(quotients: Tensor) -> Tensor:
    """Return the nearest of 0, 1, 3, 6, 10, 15, 21 and 28 with the sign of each quotient; on a tie the one at an even position."""
    found, level = torch.zeros_like(quotients), 0
    for position in range(1, 8):
        middle, level = level + position / 2, level + position
        above = quotients.abs() >= middle if position % 2 == 0 else quotients.abs() > middle
        found = torch.where(above, level * quotients.sign(), found)
    return found


class Reference:
    """The model of all ranks, its masters, and the coding errors of each rank and unit."""

    def __init__(self, model: nn.Module, settings: Settings, places: Places) -> None:
        self.settings, self.places = settings, places
        self.model = model.to(settings.dtype)
        self.params = dict(model.named_parameters())
        self.shown = [torch.zeros(padded, dtype=settings.dtype) for padded, _ in places]  # weights with which forward computes
        self.masters = [torch.zeros(padded) for padded, _ in places]
        for (_, slots), shown, master in zip(places, self.shown, self.masters, strict=True):
            for name, offset, numel in slots:
                param = self.params[name]
                master[offset : offset + numel] = param.detach().reshape(-1).float()
                param.data = shown[offset : offset + numel].view(param.shape)
        self.adam = torch.optim.AdamW(
            self.masters, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=True
        )
        self.errors = [[torch.zeros(padded) for padded, _ in places] for _ in range(settings.world)]
        self.node_errors = [
            [torch.zeros(padded) for padded, _ in places] for _ in range(settings.world // (settings.node or settings.world))
        ]
        self.count = 0

    def show(self) -> None:
        """Give the model the weights that all ranks gather."""
        for index, (shown, master) in enumerate(zip(self.shown, self.masters, strict=True)):
            low = master.to(self.settings.dtype)
            parts, coded = low.chunk(self.settings.parts), self.settings.weights and index not in self.settings.plain
            shown.copy_(torch.cat([code(part, 8).to(low.dtype) for part in parts]) if coded else low)

    def gradients(self, rank: int) -> list[Tensor]:
        """Return the values that this rank sends of each unit's gradient, in fp32, after the model's backward."""
        sent = []
        for index, (padded, slots) in enumerate(self.places):
            flat = torch.zeros(padded, dtype=self.settings.dtype)
            for name, offset, numel in slots:
                grad = self.params[name].grad
                if grad is not None:
                    flat[offset : offset + numel] = grad.reshape(-1)
                    self.params[name].grad = None
            plain = index in self.settings.plain
            sent.append(flat.float() if plain else self._send(flat.float(), self.errors[rank][index]))
        return sent

    def _send(self, values: Tensor, error: Tensor) -> Tensor:
        if not self.settings.gradients:
            return values
        parts, keep = self.settings.parts, self.settings.keep
        if keep is not None:
            values = values + error
        seen = torch.cat([code(part, 4) for part in values.chunk(parts)])
        if keep is not None:
            error.copy_(torch.cat([code(part, 8) for part in (error * keep + (values - seen) * (1 - keep)).chunk(parts)]))
        return seen

    def sum(self, sent: list[list[Tensor]]) -> list[Tensor]:
        """Return the sums over all ranks of the values that each sends."""
        size = self.settings.parts
        groups = [self._sum_of_group(sent[first : first + size], first) for first in range(0, len(sent), size)]
        if len(groups) == 1:
            return groups[0]
        # The sum of a group is sent in the dtype of the message, and is summed in it.
        low = _added([[total.to(self.settings.dtype) for total in group] for group in groups])
        return [total.float() for total in low]

    def _sum_of_group(self, sent: list[list[Tensor]], first: int) -> list[Tensor]:
        node = self.settings.node
        if not node:
            return _added(sent)
        sums = [_added(sent[start : start + node]) for start in range(0, len(sent), node)]
        errors = self.node_errors[first // node :]
        return _added([[self._send(*both) for both in zip(one, of_node, strict=True)] for one, of_node in zip(sums, errors, strict=False)])

    def step(self, totals: list[Tensor]) -> float:
        """Run one step with the gradients of all ranks; return their norm."""
        settings = self.settings
        norm = math.sqrt(sum(total.double().square().sum().item() for total in totals))
        factor = torch.clamp(settings.max_norm / (torch.tensor(norm) + 1e-6), max=1.0) if settings.max_norm else torch.tensor(1.0)
        for master, total in zip(self.masters, totals, strict=True):
            master.grad = total * factor if factor != 1.0 else total
        self.adam.step()
        self.count += 1
        if self.count % settings.reset == 0:
            for errors in [*self.errors, *self.node_errors]:
                for error in errors:
                    error.zero_()
        return norm


def _added(sent: list[list[Tensor]]) -> list[Tensor]:
    """Return, unit by unit, the first rank's values plus the second's, and so on."""
    sums = sent[0]
    for one in sent[1:]:
        sums = [total + more for total, more in zip(sums, one, strict=True)]
    return sums


def run(model: nn.Module, loss_of: Lossy, settings: Settings, places: Places) -> Outcome:
    """Train ``model``; return losses, norms, masters and weights."""
    reference, outcome = Reference(model, settings, places), Outcome()
    for step in range(settings.steps):
        losses, totals = [], [torch.zeros(padded) for padded, _ in places]
        reference.show()
        for micro in range(settings.accumulation):
            sent = []
            for rank in range(settings.world):
                loss = loss_of(reference.model, step, micro, rank)
                losses.append(loss.item())
                (loss / settings.accumulation if settings.accumulation > 1 else loss).backward()
                sent.append(reference.gradients(rank))
            sums = reference.sum(sent)
            totals = [total + one * (1 / settings.world) for total, one in zip(totals, sums, strict=True)]
        outcome.losses.append(math.fsum(losses) / len(losses))
        outcome.norms.append(reference.step(totals))
    for (_, slots), master in zip(places, reference.masters, strict=True):
        for name, offset, numel in slots:
            outcome.masters[name] = master[offset : offset + numel].view(reference.params[name].shape).clone()
    return outcome
