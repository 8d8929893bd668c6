"""A checkpoint loads at any tensor-parallel size: masters and moments are the saved ones, element by element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support import parity, ranks
from tests.support.checkpoints import contents_of
from tests.support.models import CASES, ModelCase
from tests.support.parity import Run
from tests.support.tp_training import zoo_case


def _case(name: str) -> ModelCase:
    return CASES[name] if name in CASES else zoo_case(name, {})


def _engine(name: str, stage: int, tp: int, dtype: str) -> Any:
    extra = {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    return parity.initialize(_case(name).build(), Run(stage=stage, dtype=dtype, extra=extra))


def _train_and_save(folder: str, name: str, stage: int, tp: int, dtype: str) -> dict[str, torch.Tensor] | None:
    engine = _engine(name, stage, tp, dtype)
    for step in range(2):
        batch = parity.prepare(_case(name).rows(step, 0, ranks.rank() // tp), parity.DTYPES[dtype])
        parity.micro_step(engine, batch, _case(name).forward, 0)
    engine.save_checkpoint(folder, "t")
    weights: dict[str, torch.Tensor] | None = engine._consolidated_16bit_state_dict()
    engine.destroy()
    return weights


def _load_and_save(folder: str, again: str, name: str, stage: int, tp: int, dtype: str) -> None:
    engine = _engine(name, stage, tp, dtype)
    engine.load_checkpoint(folder)
    engine.save_checkpoint(again, "t")
    engine.destroy()


# (ranks, tensor-parallel size, stage) that save, and that load
MOVES = {
    "2 to 1": ((2, 2, 3), (1, 1, 0)),
    "1 to 2": ((2, 1, 2), (2, 2, 1)),
    "2x2 to 2": ((4, 2, 1), (2, 2, 3)),
    "2 to 2x2": ((2, 2, 0), (4, 2, 2)),
    "4 to 1": ((4, 4, 1), (1, 1, 3)),
    "1 to 4": ((1, 1, 2), (4, 4, 0)),
}


@pytest.mark.fast_rows("llama-2 to 1")
@pytest.mark.parametrize("move", [pytest.param(move, marks=() if move in ("2 to 1", "2 to 2x2") else pytest.mark.slow) for move in MOVES])
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_any_size_to_any_other(tmp_path: Path, name: str, move: str) -> None:
    check_move(tmp_path, name, move)


@pytest.mark.slow  # fast: `test_any_size_to_any_other`, test_tp_heads.py
@pytest.mark.parametrize("move", ["4 to 1", pytest.param("1 to 4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", pytest.param("GPTBigCodeForCausalLM", marks=pytest.mark.slow)])
def test_heads_that_several_ranks_hold(tmp_path: Path, name: str, move: str) -> None:
    """Two key/value heads (or one, inside a fused projection) on four ranks."""
    check_move(tmp_path, name, move)


def check_move(tmp_path: Path, name: str, move: str) -> None:
    (world, tp, stage), (other_world, other_tp, other_stage) = MOVES[move]
    weights = ranks.run_ranks(_train_and_save, world, str(tmp_path / "a"), name, stage, tp, "bf16")[0]
    ranks.run_ranks(_load_and_save, other_world, str(tmp_path / "a"), str(tmp_path / "b"), name, other_stage, other_tp, "bf16")
    saved, again = contents_of(tmp_path / "a"), contents_of(tmp_path / "b")
    assert set(saved) == set(again) and any(key.startswith("exp_avg_sq") for key in saved)
    for key, value in saved.items():
        assert torch.equal(value, again[key]), key
    script = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "a")
    for key, value in saved.items():
        if key.startswith("value "):
            assert torch.equal(script[key.removeprefix("value ")], value), key
    assert weights is not None
    for key, value in weights.items():
        if f"value {key}" in saved:
            assert torch.equal(saved[f"value {key}"].to(value.dtype), value), key
