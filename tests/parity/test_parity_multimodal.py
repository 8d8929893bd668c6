"""Test vision-language models where one rank has images and another only text: no hang, and the numbers of plain PyTorch."""

from __future__ import annotations

from importlib import metadata

import pytest
from torch import nn

from tests.support import ranks
from tests.support.multimodal import MODELS, feed_of, loss, seeded
from tests.support.parity import Run, check_bitwise, check_training

NAMES = ("llava", "qwen2_5_vl", "qwen3_vl")


def _require_its_configuration(name: str) -> None:
    if name.startswith("qwen") and metadata.version("transformers").startswith("4."):
        pytest.skip(f"the tiny configuration of {name} is written with the rotary keys of transformers 5")


@pytest.mark.fast_rows("qwen2_5_vl")
@pytest.mark.parametrize("name", NAMES)
def test_images_on_one_rank(name: str) -> None:
    _require_its_configuration(name)
    ranks.run_ranks(check_stages, 2, name, False, (NAMES.index(name) % 2 + 1, 3))


@pytest.mark.slow  # fast: `test_images_on_one_rank`, test_parity_checkpointing.py
@pytest.mark.fast_rows("True")
@pytest.mark.parametrize("reentrant", [True, False])
def test_with_activation_checkpointing(reentrant: bool) -> None:
    _require_its_configuration("qwen2_5_vl")
    ranks.run_ranks(check_checkpointing, 2, "qwen2_5_vl", reentrant)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_images_on_one_of_three_ranks_with_a_frozen_tower(name: str) -> None:
    ranks.run_ranks(check_stages, 3, name, True)


def check_stages(name: str, freeze: bool, stages: tuple[int, ...] = (1, 2, 3)) -> None:
    """Compare the stages with plain PyTorch and each other; ``freeze``: the vision tower is not trained."""
    build, batch_of, tower = MODELS[name]

    def make() -> nn.Module:
        model = seeded(build)
        for parameter in model.get_submodule(tower).parameters():
            parameter.requires_grad_(not freeze)
        return model

    *others, last = [check_training(make, feed_of(batch_of), loss, Run(stage, accumulation=2, clip=0.1), label=name) for stage in stages]
    for stage, trace in zip(stages, others, strict=False):
        check_bitwise(last, trace, f"{name}: the last stage against {stage}")


def check_checkpointing(name: str, reentrant: bool) -> None:
    build, batch_of, _ = MODELS[name]

    def make() -> nn.Module:
        model = seeded(build)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    check_training(make, feed_of(batch_of), loss, Run(3, accumulation=2), label=name)
