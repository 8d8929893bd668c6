"""Experts divided over ranks that split the layers between them too (tensor parallelism), against plain PyTorch."""

from __future__ import annotations

import pytest

from tests.support import ranks, zoo
from tests.support.experts import alike, build_listed, check_experts, lopsided, mixed, with_experts, with_split_layers
from tests.support.parity import Run, check_bitwise, check_training

MODELS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")


def check_both(name: str, run: Run, tp: int, ep: int, odd: bool = False) -> object:
    feed = alike((lopsided if odd else mixed)(name), tp)
    return check_experts(name, with_split_layers(run, tp), ep, feed)


@pytest.mark.parametrize("size", [2, 4])
def test_on_four_ranks(size: int) -> None:
    ranks.run_ranks(check_four, 4, size)


def check_four(size: int) -> None:
    """At stage 0, where norms are added up otherwise; also where tokens of a rank are all for the same experts."""
    check_both(MODELS[0], Run(0, accumulation=2, clip=0.1), 2, size)
    check_both(MODELS[1], Run(3, clip=0.1), 2, size, odd=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_stage(name: str) -> None:
    for world, tp, ep in ((2, 2, 2), (4, 2, 2), (4, 2, 4), (4, 4, 4), (8, 2, 4)):
        ranks.run_ranks(check_stages, world, name, tp, ep)


def check_stages(name: str, tp: int, ep: int) -> None:
    traces = [check_both(name, Run(stage, accumulation=2, clip=0.1), tp, ep) for stage in (0, 1, 2, 3)]
    check_bitwise(traces[3], traces[1], f"{name}: stage 3 against 1")
    check_bitwise(traces[3], traces[2], f"{name}: stage 3 against 2")
    for stage in (1, 3):
        check_both(name, Run(stage, dtype="bf16", accumulation=2, clip=0.1), tp, ep)


def test_experts_in_a_list() -> None:
    ranks.run_ranks(check_list, 2)


def check_list() -> None:
    inputs = {"partition_config": {"layer_specs": [{"patterns": ["head"], "partition_type": "column"}]}}
    run = with_experts(Run(3, accumulation=2, extra={"tensor_parallel": {"autotp_size": 2, **inputs}}), 2)
    forward = lambda model, batch: model(**batch)  # noqa: E731
    check_training(build_listed, alike(mixed("MixtralForCausalLM"), 2), forward, run, label="a list of experts")
