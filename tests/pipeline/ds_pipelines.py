"""Training of one list of layers as a ``PipelineModule`` beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.deepspeed.pipe.building import LayerSpec, TiedLayerSpec
from hf_zero.deepspeed.pipe.module import PipelineModule
from tests.support import parity, ranks
from tests.support.models import Batch
from tests.support.parity import Run

VOCABULARY, WIDTH = 11, 8
SEED = 5
TOLERANCE = {"fp32": (2e-6, 2e-5, 2e-5), "bf16": (2e-3, 1e-2, 2**-6), "fp16": (1e-3, 5e-3, 2**-8)}  # loss, norm, weight
Layers = Callable[[], list[Any]]


class Block(nn.Module):
    """A layer whose input and result are two tensors, one of which it passes on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = parts
        return hidden + torch.tanh(self.inner(self.norm(hidden))) * mask.to(hidden.dtype)[..., None], mask


class Embed(nn.Module):
    """Tokens and a mask as hidden states and the mask; as ``head`` the other way round."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)

    def forward(self, parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.tokens(parts[0]), parts[1]


def head(layer: nn.Module, parts: tuple[Tensor, Tensor]) -> Tensor:
    weight: Any = layer.get_parameter("tokens.weight")
    return parts[0] @ weight.T


def halve(parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return parts[0] * 0.5, parts[1]


def tied_layers() -> list[Any]:
    """An embedding that is the head too, blocks, and a function."""
    tied = TiedLayerSpec("embed", Embed, VOCABULARY, WIDTH, tied_weight_attr="tokens.weight")
    last = TiedLayerSpec("embed", Embed, VOCABULARY, WIDTH, forward_fn=head, tied_weight_attr="tokens.weight")
    return [tied, *(LayerSpec(Block, WIDTH) for _ in range(2)), halve, *(LayerSpec(Block, WIDTH) for _ in range(2)), last]


class Head(nn.Linear):
    """Logits of hidden states beside a mask."""

    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(parts[0])


def half_frozen_layers() -> list[Any]:
    """Modules, of which the first half is frozen, between two functions."""
    frozen: list[nn.Module] = [Embed(VOCABULARY, WIDTH), Block(WIDTH)]
    for layer in frozen:
        layer.requires_grad_(False)
    return [*frozen, halve, Block(WIDTH), Block(WIDTH), Head(WIDTH, VOCABULARY)]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Plain(nn.Module):
    """The same layers, with the same names, in a loop."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.calls: list[Callable[[Any], Any]] = []
        for place, layer in enumerate(layers):
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in self.tied_modules:
                    self.tied_modules[layer.key] = layer.build()
                module, special = self.tied_modules[layer.key], layer.forward_fn
                self.calls.append(module if special is None else lambda given, run=special, of=module: run(of, given))
            elif isinstance(layer, (LayerSpec, nn.Module)):
                module = layer.build() if isinstance(layer, LayerSpec) else layer
                self.add_module(str(place), module)
                self.calls.append(module)
            else:
                self.calls.append(layer)

    def forward(self, tokens: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        given: Any = (tokens, mask)
        for call in self.calls:
            given = call(given)
        return loss_of(given, labels)


def rows(step: int, micro: int, replica: int) -> Batch:
    """Two samples, whose length depends on the micro-step."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + replica)
    shape = (2, 5 + micro % 2)
    tokens, labels = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
    return {"tokens": tokens, "mask": torch.rand(shape, generator=generator) > 0.3, "labels": labels}


def feed(run: Run, replica: int, first: int = 0, steps: int | None = None) -> Iterator[Any]:
    """What a script's iterator gives: (inputs, labels) of every micro-step."""
    for step in range(first, first + (steps or run.steps)):
        for micro in range(run.accumulation):
            batch = parity.prepare(rows(step, micro, replica), parity.DTYPES[run.dtype])
            yield (batch["tokens"], batch["mask"]), batch["labels"]


def build(stages: int, layers: Layers = tied_layers, **arguments: Any) -> PipelineModule:
    torch.manual_seed(SEED)
    return PipelineModule(layers(), num_stages=stages, **{"loss_fn": loss_of, "partition_method": "uniform", **arguments})


def replica_of(stages: int) -> int:
    """Which of the ranks that train on samples of their own this one is: stages are outermost."""
    return ranks.rank() % (ranks.world() // stages)


def expected(run: Run, replicas: int, layers: Layers = tied_layers) -> parity.Trace:
    """Plain PyTorch on the micro-batches of all replicas."""
    torch.manual_seed(SEED)
    return parity.reference(Plain(layers()), rows, lambda model, batch: model(**batch), run, replicas)


def compare(run: Run, losses: list[float], norms: list[float], weights: dict[str, Tensor] | None, wanted: parity.Trace, label: Any) -> None:
    """Losses, norms and weights are those of ``wanted``."""
    loss, norm, weight = TOLERANCE[run.dtype]
    assert losses == pytest.approx(wanted.losses, rel=loss), (label, losses, wanted.losses)
    taken = [place for place, skipped in enumerate(wanted.skipped) if not skipped]
    assert [norms[place] for place in taken] == pytest.approx([wanted.norms[place] for place in taken], rel=norm), (
        label,
        norms,
        wanted.norms,
    )
    assert weights is not None and weights.keys() == wanted.weights.keys(), (label, weights and weights.keys())
    for name, value in wanted.weights.items():
        worst = (weights[name].float() - value.float()).abs().max() / value.float().abs().max().clamp(min=0.01)
        assert weights[name].shape == value.shape and worst < weight, (label, name, float(worst))


def check(run: Run, stages: int, layers: Layers = tied_layers, **arguments: Any) -> None:
    """Trains the layers over ``stages`` with ``train_batch``, on every rank, and compares with plain PyTorch."""
    engine = parity.initialize(build(stages, layers, **arguments), run)
    batches = feed(run, replica_of(stages)) if engine.is_first_stage() or engine.is_last_stage() else None
    losses, norms, skipped = [], [], []
    for _ in range(run.steps):
        losses.append(float(engine.train_batch(batches)))
        norms.append(parity.as_float(engine.get_global_grad_norm()))
        skipped.append(bool(engine.optimizer.overflow))
    assert engine.global_steps == run.steps and engine.micro_steps == run.steps * run.accumulation
    weights = engine._consolidated_16bit_state_dict()
    engine.destroy()
    if ranks.rank() == 0:
        wanted = expected(run, ranks.world() // stages, layers)
        assert skipped == wanted.skipped, (run, stages, skipped, wanted.skipped)
        compare(run, losses, norms, weights, wanted, (run, stages, arguments))
