"""Every family of layouts trains over two and four ranks as on one, with every ZeRO stage: losses, norms, trained weights."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import ranks
from tests.support.parity import Run
from tests.support.tp_training import check_against_one_rank, zoo_case

FALCON_ONE = {"multi_query": True, "new_decoder_architecture": False}
FALCON_GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Conv1D, fused": ("GPT2LMHeadModel", {}),
    "fused per head": ("GPTNeoXForCausalLM", {}),
    "fused per head, ALiBi": ("BloomForCausalLM", {}),
    "fused, one key/value head": ("FalconForCausalLM", FALCON_ONE),
    "fused by groups": ("FalconForCausalLM", FALCON_GROUPED),
    "fused, one key/value head, biases": ("GPTBigCodeForCausalLM", {}),
    "fused query/key/value and gate/up": ("Phi3ForCausalLM", {}),
    "gated MLP, grouped heads": ("LlamaForCausalLM", {}),
    "norms over all heads": ("Olmo2ForCausalLM", {}),
    "packed experts": ("MixtralForCausalLM", {}),
    "lists of experts": ("SwitchTransformersForConditionalGeneration", {}),
    "shared relative biases": ("T5ForConditionalGeneration", {}),
    "disentangled attention": ("DebertaV2ForMaskedLM", {}),
    "shared blocks": ("AlbertForMaskedLM", {}),
}
STAGES = [Run(stage=stage, clip=0.5, accumulation=2) for stage in (0, 1, 2, 3)]


def check(family: str, tp: int, runs: list[Run]) -> None:
    check_against_one_rank(zoo_case(*FAMILIES[family]), tp, runs)


@pytest.mark.fast_rows("fused by groups-1")
@pytest.mark.parametrize(("family", "stage"), [("fused, one key/value head, biases", 3), ("fused by groups", 1)])
def test_four_ranks_share_heads(family: str, stage: int) -> None:
    ranks.run_ranks(check, 4, family, 4, [STAGES[stage]])


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, tp: int) -> None:
    ranks.run_ranks(check, 4, family, tp, STAGES, timeout=240)
