"""Activation checkpointing, reentrant and not: recomputation changes memory, never a bit of the result."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import ranks
from tests.support.models import CASES, Mlp, class_loss
from tests.support.parity import Run, Trace, check, check_bitwise, initialize, reference_case, train

STAGES = (0, 1, 2, 3)


class Checkpointed(Mlp):
    """Recomputes every block in backward; ``mode`` None: no checkpointing. ``nested``: a checkpoint inside a checkpoint."""

    def __init__(self, mode: str | None) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        if self.mode == "nested":
            return self.head(checkpoint(self._all_blocks, hidden, use_reentrant=False))
        return self.head(self._all_blocks(hidden))

    def _all_blocks(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.mode == "reentrant") if self.mode else block(hidden)
        return hidden


def _train_plain(mode: str | None, run: Run) -> Trace:
    torch.manual_seed(0)
    engine = initialize(Checkpointed(mode).train(), run)
    trace = train(engine, CASES["mlp"].rows, class_loss, run)
    engine.destroy()
    return trace


def _plain(run: Run, mode: str) -> None:
    check_bitwise(_train_plain(mode, run), _train_plain(None, run), f"checkpointing {mode}")


def _train_transformers(name: str, run: Run, reentrant: bool | None) -> Trace:
    case = CASES[name]
    model = case.build()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    engine = initialize(model, run)
    trace = train(engine, case.rows, case.forward, run)
    engine.destroy()
    return trace


def _transformers(name: str, run: Run, reentrant: bool) -> None:
    trace = _train_transformers(name, run, reentrant)
    # Reentrant recomputation adds up the encoder output's gradients in another order, in plain PyTorch as well.
    if not (name == "bart" and reentrant):
        check_bitwise(trace, _train_transformers(name, run, None), f"{name} with gradient_checkpointing_enable")
    if ranks.rank() == 0:
        check(trace, partial(reference_case, name, run, ranks.world()), run, name)


def _input_gradients(run: Run) -> None:
    """Frozen below, trainable above, with ``enable_input_require_grads``: what PEFT users run."""
    traces = []
    for reentrant in (None, True):
        case = CASES["gpt2"]
        model = case.build()
        model.requires_grad_(False)
        model.transformer.h[1].mlp.requires_grad_(True)
        if reentrant is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        engine = initialize(model, run)
        traces.append(train(engine, case.rows, case.forward, run))
        engine.destroy()
    check_bitwise(traces[1], traces[0], "frozen model with reentrant checkpointing")


@pytest.mark.parametrize("mode", ["reentrant", "not reentrant", "nested"])
@pytest.mark.parametrize("stage", STAGES)
def test_plain_checkpointing_is_bitwise_the_same(stage: int, mode: str) -> None:
    ranks.run_ranks(_plain, 2, Run(stage=stage, accumulation=2), mode)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
@pytest.mark.parametrize("stage", STAGES)
def test_transformers_checkpointing_is_bitwise_the_same(stage: int, name: str, reentrant: bool) -> None:
    ranks.run_ranks(_transformers, 2, name, Run(stage=stage, accumulation=2, clip=0.1), reentrant)


@pytest.mark.parametrize("stage", STAGES)
def test_checkpointing_in_bf16(stage: int) -> None:
    ranks.run_ranks(_transformers, 2, "llama", Run(stage=stage, dtype="bf16"), False)


@pytest.mark.parametrize("stage", STAGES)
def test_reentrant_checkpointing_of_a_mostly_frozen_model(stage: int) -> None:
    ranks.run_ranks(_input_gradients, 2, Run(stage=stage))
