"""Test that every text architecture of the installed transformers trains at stage 3 like in plain PyTorch."""

from __future__ import annotations

import pytest

from tests.parity.tables import canary
from tests.support import zoo
from tests.support.parity import Trace
from tests.support.versions import TRANSFORMERS_5

# What no other test has. Recurrent and hybrid layers, shared layers, latent attention, experts of three kinds, odd containers.
SAMPLE = [
    "BambaForCausalLM",
    "DeepseekV3ForCausalLM",
    "FunnelForMaskedLM",
    "Gemma3nForCausalLM",
    "GptOssForCausalLM",
    "JambaForCausalLM",
    "LongT5ForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "ReformerModelWithLMHead",
    "SwitchTransformersForConditionalGeneration",
    "XLNetLMHeadModel",
    "Zamba2ForCausalLM",
]
# Left to the test of every architecture: their experts, and T5's layers, have tests of their own.
LEFT_OUT = ("GptOssForCausalLM", "LongT5ForConditionalGeneration", "SwitchTransformersForConditionalGeneration")
OTHERS_IN_4 = ("JambaForCausalLM", "Zamba2ForCausalLM")  # transformers 4 needs kernels, or other sizes
PARTS = 12


def test_sample() -> None:
    names = [name for name in SAMPLE if name not in LEFT_OUT and (TRANSFORMERS_5 or name not in OTHERS_IN_4)]
    _expect_none([sighting for sighting in canary.check_all(names) if sighting.problem])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_architecture(part: int) -> None:
    names = [item.name for item in zoo.architectures()][part::PARTS]
    _expect_none([sighting for sighting in canary.check_all(names) if sighting.problem])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_sample_of_other_stages(stage: int) -> None:
    _expect_none([sighting for sighting in canary.check_all(SAMPLE, stage=stage) if sighting.problem])


@pytest.mark.slow
def test_sample_on_three_ranks() -> None:
    _expect_none([sighting for sighting in canary.check_all(SAMPLE, world_size=3) if sighting.problem])


def test_there_are_well_over_a_hundred() -> None:
    names = [item.name for item in zoo.architectures()]
    assert len(names) > 200
    assert not zoo.LEFT_OUT.keys() & set(names)


def test_a_wrong_norm_is_a_problem() -> None:
    expected = Trace(losses=[1.0], norms=[2.0])
    assert not canary.compare("right", expected, expected).problem
    assert "differs" in canary.compare("wrong", Trace(losses=[1.0], norms=[2.001]), expected).problem
    assert "gradient norm of 0" in canary.compare("dead", Trace(losses=[1.0], norms=[0.0]), Trace(losses=[1.0], norms=[0.0])).problem


def _expect_none(bad: list[canary.Sighting]) -> None:
    assert not bad, "\n".join(f"{sighting.name}: {sighting.problem}" for sighting in bad)
