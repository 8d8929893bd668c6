"""Test mixture of experts: ranks whose tokens are routed to different experts train like plain PyTorch on the tokens of all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support import ranks, zoo
from tests.support.models import Batch
from tests.support.parity import Run, check_bitwise, check_training

MODELS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")


@pytest.mark.slow  # fast: test_parity_matrix.py has Mixtral, test_canary.py DeepSeek
def test_mixtral_qwen3_deepseek() -> None:
    """Check fp32, stages 1 to 3, with accumulation; the stages are bitwise equal to each other."""
    ranks.run_ranks(check_every_stage, 2, MODELS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["GptOssForCausalLM", "JetMoeForCausalLM", "Qwen3NextForCausalLM", "SwitchTransformersForConditionalGeneration"]
)
def test_other_experts(name: str) -> None:
    ranks.run_ranks(check_every_stage, 2, [name])


@pytest.mark.slow
def test_three_ranks_in_bf16() -> None:
    ranks.run_ranks(check_bf16, 3, MODELS)


def check_every_stage(names: list[str]) -> None:
    for name in names:
        assert_experts_differ(name)
        traces = [check_training(lambda n=name: build(n), feed_of(name), loss, Run(stage, accumulation=2, clip=0.1)) for stage in (1, 2, 3)]
        check_bitwise(traces[2], traces[0], f"{name}: stage 3 against 1")
        check_bitwise(traces[2], traces[1], f"{name}: stage 3 against 2")


def check_bf16(names: list[str]) -> None:
    for name in names:
        check_training(lambda n=name: build(n), feed_of(name), loss, Run(3, dtype="bf16"), label=name)


def build(name: str) -> nn.Module:
    """Return the zoo's model, with weights large enough for a router to distinguish tokens."""
    model = zoo.build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def feed_of(name: str):  # type: ignore[no-untyped-def]
    """Return rows that repeat one token, another one on every rank: all tokens of a rank are routed to the same few experts."""

    def feed(step: int, micro: int, rank: int) -> Batch:
        batch = zoo.batch(name, torch.Generator().manual_seed(step))
        return {key: torch.full_like(value, zoo.FIRST_TOKEN + 7 * rank + micro + step) for key, value in batch.items()}

    return feed


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return zoo.loss(model, batch)


def assert_experts_differ(name: str) -> None:
    """Check that in plain PyTorch the ranks' batches give gradients to different experts."""
    used = []
    for rank in range(ranks.world()):
        model = build(name)
        loss(model, feed_of(name)(0, 0, rank)).backward()
        used.append({found for key, parameter in model.named_parameters() for found in _experts_of(key, parameter)})
    assert all(used) and used[0] != used[1], f"{name}: experts {used}"


def _experts_of(name: str, parameter: nn.Parameter) -> list[tuple[str, int]]:
    """Return (parameter, expert) for the experts that got a gradient; experts are the first dimension, or modules of a list."""
    if "expert" not in name or "shared" in name or parameter.grad is None:
        return []
    if parameter.dim() < 3:
        return [(name, 0)] if parameter.grad.any() else []
    return [(name, index) for index, grad in enumerate(parameter.grad) if grad.any()]
