"""A checkpoint loads on any number of expert-parallel ranks: masters and moments are the saved ones, element by element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from hf_zero.utils import safe_get_full_optimizer_state
from tests.support import parity, ranks, zoo
from tests.support.checkpoints import contents_of
from tests.support.experts import build, mixed, with_adapters, with_experts
from tests.support.parity import Run

NAME = "Qwen3MoeForCausalLM"
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}


def _model(kind: str) -> Any:
    model = build(NAME)
    return with_adapters(model, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]) if kind == "adapted" else model


def _engine(stage: int, size: int, kind: str) -> Any:
    model = _model(kind)
    if kind == "frozen":
        for name, param in model.named_parameters():
            param.requires_grad_("experts" not in name or "layers.1" in name)
    zero: dict[str, Any] = {"stage3_gather_16bit_weights_on_model_save": True}
    if kind == "groups" and ranks.world() == 4:
        zero["mics_shard_size"] = 2
    run = Run(stage=stage, dtype="bf16", extra={"zero_optimization": zero, **(LAMB if kind == "lamb" else {})})
    return parity.initialize(model, with_experts(run, size) if size > 1 else run)


def _whole_states(engine: Any) -> dict[str, torch.Tensor]:
    """What LAMB keeps for each parameter, of the shape of all experts."""
    found = {}
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = safe_get_full_optimizer_state(param, key)
            assert value is not None and value.any()
            found[f"{key} {name}"] = value
    return found


def _train_and_save(folder: str, stage: int, size: int, kind: str) -> tuple[dict[str, torch.Tensor] | None, dict[str, torch.Tensor]]:
    engine = _engine(stage, size, kind)
    for step in range(2):
        batch = parity.prepare(mixed(NAME)(step, 0, ranks.rank()), torch.bfloat16)
        parity.micro_step(engine, batch, zoo.loss, 0)
    engine.save_checkpoint(folder, "t")
    engine.save_16bit_model(f"{folder}/hf")
    weights: dict[str, torch.Tensor] | None = engine._consolidated_16bit_state_dict()
    states = _whole_states(engine) if kind == "lamb" else {}
    engine.destroy()
    return weights, states


def _load_and_save(folder: str, again: str, stage: int, size: int, kind: str) -> dict[str, torch.Tensor]:
    engine = _engine(stage, size, kind)
    engine.load_checkpoint(folder)
    engine.save_checkpoint(again, "t")
    states = _whole_states(engine) if kind == "lamb" else {}
    engine.destroy()
    return states


# (ranks, expert-parallel size, stage) that save, and that load; all of it is trained, without some experts, or adapters;
# LAMB keeps states of whole tensors; of 4 ranks, each 2 may be a shard group
MOVES = {
    "2 to none": ((2, 2, 3), (1, 1, 0), "all"),
    "none to 2": ((2, 1, 2), (2, 2, 1), "frozen"),
    "2 of 4 to 4": ((4, 2, 3), (4, 4, 2), "all"),
    "4 to 2": ((4, 4, 0), (2, 2, 3), "frozen"),
    "adapters, 2 to none": ((2, 2, 3), (1, 1, 0), "adapted"),
    "adapters, 4 to 2": ((4, 4, 1), (2, 2, 3), "adapted"),
    "LAMB, 2 to none": ((2, 2, 3), (1, 1, 0), "lamb"),
    "LAMB, none to 2": ((2, 1, 2), (2, 2, 0), "lamb"),
    "shard groups to none": ((4, 2, 3), (2, 1, 1), "groups"),
    "none to shard groups": ((2, 1, 3), (4, 2, 3), "groups"),
    "2 of 4 to none": ((4, 2, 1), (2, 1, 3), "frozen"),
}


QUICK = ("2 to none", "4 to 2", "adapters, 2 to none", "LAMB, 2 to none", "shard groups to none")


@pytest.mark.parametrize("move", [pytest.param(move, marks=() if move in QUICK else pytest.mark.slow) for move in MOVES])
def test_any_size_to_any_other(tmp_path: Path, move: str) -> None:
    (world, size, stage), (other_world, other_size, other_stage), kind = MOVES[move]
    weights, states = ranks.run_ranks(_train_and_save, world, str(tmp_path / "a"), stage, size, kind)[0]
    loaded = ranks.run_ranks(_load_and_save, other_world, str(tmp_path / "a"), str(tmp_path / "b"), other_stage, other_size, kind)[0]
    assert states.keys() == loaded.keys() and all(torch.equal(value, loaded[key]) for key, value in states.items())
    saved, again = contents_of(tmp_path / "a"), contents_of(tmp_path / "b")
    assert set(saved) == set(again) and any(key.startswith("exp_avg_sq") and "experts" in key for key in {*saved, *states})
    for key, value in saved.items():
        assert torch.equal(value, again[key]), key
    script = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "a")
    for key, value in saved.items():
        if key.startswith("value "):
            assert torch.equal(script[key.removeprefix("value ")], value), key
    assert weights is not None and set(weights) == set(_model(kind).state_dict())
    for key, value in weights.items():
        if f"value {key}" in saved:
            assert torch.equal(saved[f"value {key}"].to(value.dtype), value), key
    _check_files(tmp_path / "a" / "hf", weights)


def _check_files(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """``save_16bit_model`` writes what ``_consolidated_16bit_state_dict`` returns, under transformers' own names."""
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    for key, value in stored.items():
        assert torch.equal(value, weights[key]), key
    assert any("experts" in key and value.dim() == 3 for key, value in stored.items())
