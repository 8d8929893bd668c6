"""Training with tensor parallelism through the engine is training on one rank: losses, norms, weights; every stage, 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_zero.errors import StateError
from tests.support import parity, ranks
from tests.support.models import CASES
from tests.support.parity import Run
from tests.support.processes import MOST_SECONDS
from tests.support.tp_training import check_against_one_rank


def check_case(name: str, tp: int, runs: list[Run]) -> None:
    check_against_one_rank(CASES[name], tp, runs)


STAGES = {"llama": 3, "gpt2": 1, "t5": 3, "bart": 2, "albert": 1, "mixtral": 3, "deberta_v2": 0, "vit": 3}
RUNS = [Run(stage=stage, clip=0.5, accumulation=2) for stage in (0, 1, 2, 3)]


@pytest.mark.fast_rows("gpt2", "t5", "mixtral", "llama")
@pytest.mark.parametrize("name", STAGES)
def test_two_ranks_hold_one_model(name: str) -> None:
    """Every architecture at one stage."""
    ranks.run_ranks(check_case, 2, name, 2, [RUNS[STAGES[name]]])


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_two_ranks_hold_one_model_at_every_stage(name: str) -> None:
    ranks.run_ranks(check_case, 2, name, 2, RUNS)


def test_two_groups_of_two() -> None:
    ranks.run_ranks(check_case, 4, "gpt2", 2, [RUNS[0], RUNS[3]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_two_groups_of_two_at_every_stage(name: str) -> None:
    ranks.run_ranks(check_case, 4, name, 2, RUNS)


@pytest.mark.slow  # fast: `test_two_ranks_hold_one_model`; test_parity_matrix.py in 16 bit
def test_bf16() -> None:
    ranks.run_ranks(check_case, 2, "llama", 2, [Run(stage=stage, dtype="bf16") for stage in (1, 3)])


def test_config_asks_for_more_ranks_than_divide() -> None:
    outcomes = ranks.observe_ranks(check_case, 2, "llama", 3, [Run()], grace=MOST_SECONDS)
    for words in ("does not fit the 2 rank(s)", "tensor_parallel.autotp_size: tp 3"):
        assert all(words in outcome.text for outcome in outcomes)


def _bad_heads() -> str:
    import hf_zero

    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 7))
    try:
        hf_zero.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}})
    except hf_zero.errors.ConfigError as error:
        return str(error)
    return ""


def test_model_that_does_not_divide() -> None:
    first, second = ranks.run_ranks(_bad_heads, 2)
    assert first == second
    assert "Sequential" in first


def _different_data() -> str:
    case = CASES["gpt2"]
    engine = parity.initialize(case.build(), Run(extra={"tensor_parallel": {"autotp_size": 2}}))
    try:
        case.forward(engine, case.rows(0, 0, ranks.rank()))
    except StateError as error:
        assert isinstance(error, AssertionError) and str(error).startswith("Data inconsistency within the TP group. Please check the Data")
        return " ".join(getattr(error, "__notes__", [str(error)]))
    return ""


def test_different_data_in_a_group_is_an_error_that_names_the_ranks() -> None:
    texts = ranks.run_ranks(_different_data, 4)
    assert texts[0] == texts[1] and "rank 0 and rank 1 were given different input_ids" in texts[0]
    assert texts[2] == texts[3] and "rank 2 and rank 3 were given different input_ids" in texts[2]


def _seeds_by_rank(folder: str) -> tuple[list[float], float]:
    """Losses with dropout where each rank sets a seed of its own after the split, and again after a checkpoint was loaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16)).train()
    engine = parity.initialize(model, Run(stage=1, extra={"tensor_parallel": {"autotp_size": 2}}))
    losses = []
    for step in range(2):
        if step:
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
        torch.manual_seed(7 * step + ranks.rank())
        losses.append(parity.micro_step(engine, CASES["gpt2"].rows(step, 0, 0), CASES["gpt2"].forward, 0))
    return losses, float(torch.rand(()))


def test_ranks_of_a_group_draw_the_same_whatever_seeds_they_have(tmp_path: Path) -> None:
    first, second = ranks.run_ranks(_seeds_by_rank, 2, str(tmp_path))
    assert first == second


def _sampled_by_rank() -> list[int]:
    """Tokens that ranks of a group sample after each has set a seed of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=None)
    engine = parity.initialize(GPT2LMHeadModel(config).eval(), Run(stage=1, extra={"tensor_parallel": {"autotp_size": 2}}))
    torch.manual_seed(ranks.rank())
    found: list[int] = engine.module.generate(torch.tensor([[5, 6]]), max_new_tokens=12, do_sample=True, pad_token_id=0)[0].tolist()
    return found


def test_ranks_of_a_group_sample_the_same_tokens_whatever_seeds_they_have() -> None:
    first, second = ranks.run_ranks(_sampled_by_rank, 2)
    assert first == second
