"""Test activation checkpointing, reentrant and not: recomputation changes memory, never a bit of the result."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support import ranks
from tests.support.models import CASES, Mlp, class_loss
from tests.support.parity import Run, check, check_bitwise, check_training, initialize, reference_case, train
from tests.support.recomputation import check_recomputation, train_transformers
from tests.support.rows import slow_but, thinned
from tests.support.versions import needs

STAGES = (0, 1, 2, 3)


def _transformers(name: str, run: Run, reentrant: bool) -> None:
    trace = train_transformers(name, run, reentrant)
    # Reentrant recomputation adds up the encoder output's gradients in another order, in plain PyTorch as well.
    if not (name == "bart" and reentrant):
        check_bitwise(trace, train_transformers(name, run, None), f"{name} with gradient_checkpointing_enable")
    if ranks.rank() == 0:
        check(trace, partial(reference_case, name, run, ranks.world()), run, name)


def _input_gradients(run: Run) -> None:
    """Train a model that is frozen below and trained above, with ``enable_input_require_grads``, as PEFT users do."""
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


class Selective(Mlp):
    """A model with a region of two blocks, and a read of another block's parameter, whose recomputation keeps some results."""

    def _region(self, hidden: Tensor) -> Tensor:
        inner: Tensor = self.blocks[1](self.blocks[0](hidden))
        return inner * self.blocks[2].down.bias.sum().exp()

    def forward(self, inputs: Tensor) -> Tensor:
        kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default, torch.ops.aten.mul.Tensor])
        hidden = checkpoint(self._region, self.entry(inputs), use_reentrant=False, context_fn=kept)
        logits: Tensor = self.head(self.blocks[2](hidden))
        return logits


def _build_selective() -> nn.Module:
    torch.manual_seed(0)
    return Selective()


def _selective(run: Run) -> None:
    check_training(_build_selective, CASES["mlp"].rows, class_loss, run, label="selective checkpointing")


@pytest.mark.parametrize("stage", slow_but((2, 3), 3))
def test_selective_checkpointing_over_several_blocks(stage: int) -> None:
    ranks.run_ranks(_selective, 2, Run(stage=stage))


@pytest.mark.fast_rows("2-not reentrant", "3-nested")
@thinned(stage=STAGES, mode=["reentrant", "not reentrant", "nested"])
def test_plain_checkpointing_is_bitwise_the_same(stage: int, mode: str) -> None:
    ranks.run_ranks(check_recomputation, 2, Run(stage=stage, accumulation=2), mode)


@pytest.mark.fast_rows("2-llama-False", "3-bart-True")
@thinned(stage=STAGES, name=["gpt2", "llama", "bart"], reentrant=[True, False])
def test_transformers_checkpointing_is_bitwise_the_same(stage: int, name: str, reentrant: bool) -> None:
    ranks.run_ranks(_transformers, 2, name, Run(stage=stage, accumulation=2, clip=0.1), reentrant)


@needs("transformers", "5.0", "a forward with a cache, which checkpointing turns off, rounds otherwise")
@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_checkpointing_in_bf16(stage: int) -> None:
    ranks.run_ranks(_transformers, 2, "llama", Run(stage=stage, dtype="bf16"), False)


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_reentrant_checkpointing_of_a_mostly_frozen_model(stage: int) -> None:
    ranks.run_ranks(_input_gradients, 2, Run(stage=stage))
