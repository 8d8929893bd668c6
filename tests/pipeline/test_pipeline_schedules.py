"""torch's schedules over the stages of a model: each trains like plain PyTorch."""

from __future__ import annotations

import pytest

from hf_zero.errors import ConfigError
from tests.support import ranks
from tests.support.parity import Run
from tests.support.pipelines import check, check_schedule
from tests.support.tp_training import zoo_case

FOUR = {"num_hidden_layers": 4, "tie_word_embeddings": True}


def check_single(zero: int) -> None:
    case = zoo_case("LlamaForCausalLM", FOUR)
    for name in ("1F1B", "GPipe"):
        check_schedule(case, Run(zero, accumulation=4, clip=0.1), 2, name)


def check_several(zero: int) -> None:
    case = zoo_case("LlamaForCausalLM", FOUR)
    for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        check_schedule(case, Run(zero, accumulation=4, clip=0.1), 2, name, each=2)
    with pytest.raises(ConfigError, match="DualPipeV of 2 part.* gradient_accumulation_steps"):
        check_schedule(case, Run(zero, accumulation=2), 2, "DualPipeV", each=2)
    check(case, Run(zero, clip=0.1), 2, schedule="ZBVZeroBubble", stages_per_rank=2)


def test_one_stage_a_rank() -> None:
    ranks.run_ranks(check_single, 2, 1)


def test_two_stages_a_rank() -> None:
    ranks.run_ranks(check_several, 2, 1)
