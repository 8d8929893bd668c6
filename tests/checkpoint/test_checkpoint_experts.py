"""A checkpoint loads on any number of expert-parallel ranks: masters and moments are the saved ones, element by element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from hf_zero.utils import safe_get_full_optimizer_state
from tests.support import parity, ranks, zoo
from tests.support.checkpoints import contents_of, on_node
from tests.support.experts import build, mixed, with_adapters, with_experts, with_split_layers
from tests.support.parity import Run
from tests.support.versions import TRANSFORMERS_5

NAME = "Qwen3MoeForCausalLM"
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}


def _model(kind: str) -> Any:
    model = build(NAME)
    of_experts = {"target_parameters": ["mlp.experts.down_proj"]} if TRANSFORMERS_5 else {}
    modules = ["q_proj"] if TRANSFORMERS_5 else ["q_proj", "down_proj"]
    return with_adapters(model, target_modules=modules, **of_experts) if kind == "adapted" else model


def _engine(kind: str, stage: int, size: int, tp: int = 1) -> Any:
    model = _model(kind)
    if kind == "frozen":
        for name, param in model.named_parameters():
            param.requires_grad_("experts" not in name or "layers.1" in name)
    zero: dict[str, Any] = {"stage3_gather_16bit_weights_on_model_save": True}
    if kind == "groups" and ranks.world() == 4:
        zero["mics_shard_size"] = 2
    run = Run(stage=stage, dtype="bf16", extra={"zero_optimization": zero, **(LAMB if kind == "lamb" else {})})
    run = with_split_layers(run, tp) if tp > 1 else run
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


def _train_and_save(folder: str, kind: str, *sizes: int) -> tuple[dict[str, torch.Tensor] | None, dict[str, torch.Tensor]]:
    """``sizes``: stage, expert-parallel and tensor-parallel ranks."""
    engine, tp = _engine(kind, *sizes), sizes[2] if len(sizes) > 2 else 1
    for step in range(2):
        batch = parity.prepare(mixed(NAME)(step, 0, ranks.rank() // tp), torch.bfloat16)
        parity.micro_step(engine, batch, zoo.loss, 0)
    engine.save_checkpoint(folder, "t")
    engine.save_16bit_model(f"{folder}/hf")
    weights: dict[str, torch.Tensor] | None = engine._consolidated_16bit_state_dict()
    states = _whole_states(engine) if kind == "lamb" else {}
    engine.destroy()
    return weights, states


def _load_and_save(folder: str, again: str, kind: str, *sizes: int) -> dict[str, torch.Tensor]:
    engine = _engine(kind, *sizes)
    engine.load_checkpoint(folder)
    engine.save_checkpoint(again, "t")
    states = _whole_states(engine) if kind == "lamb" else {}
    engine.destroy()
    return states


# (ranks, stage, expert-parallel size, and tensor-parallel size if not 1) that save, and that load; all of it is trained, without some
# experts, or adapters;
# LAMB keeps states of whole tensors; of 4 ranks, each 2 may be a shard group
MOVES = {
    "2 to none": ((2, 3, 2), (1, 0, 1), "all"),
    "none to 2": ((2, 2, 1), (2, 1, 2), "frozen"),
    "2 of 4 to 4": ((4, 3, 2), (4, 2, 4), "all"),
    "4 to 2": ((4, 0, 4), (2, 3, 2), "frozen"),
    "adapters, 2 to none": ((2, 3, 2), (1, 0, 1), "adapted"),
    "adapters, 4 to 2": ((4, 1, 4), (2, 3, 2), "adapted"),
    "LAMB, 2 to none": ((2, 3, 2), (1, 0, 1), "lamb"),
    "LAMB, none to 2": ((2, 2, 1), (2, 0, 2), "lamb"),
    "shard groups to none": ((4, 3, 2), (2, 1, 1), "groups"),
    "none to shard groups": ((2, 3, 1), (4, 3, 2), "groups"),
    "2 of 4 to none": ((4, 1, 2), (2, 3, 1), "frozen"),
    "4 beside split layers to none": ((4, 3, 4, 2), (1, 0, 1), "all"),
    "2 beside split layers to 2": ((4, 1, 2, 2), (2, 3, 2), "frozen"),
    "none to 4 beside split layers": ((2, 2, 1), (4, 0, 4, 2), "all"),
    "2 of 4 to 4 beside split layers": ((4, 0, 2), (4, 3, 4, 4), "frozen"),
    "split layers to 2 beside them": ((2, 3, 1, 2), (4, 3, 2, 2), "adapted"),
}


QUICK = ("2 to none", "4 to 2", "adapters, 2 to none", "LAMB, 2 to none", "shard groups to none", "4 beside split layers to none")


@pytest.mark.fast_rows("2 to none", "adapters, 2 to none")
@pytest.mark.parametrize("move", [pytest.param(move, marks=() if move in QUICK else pytest.mark.slow) for move in MOVES])
def test_any_size_to_any_other(tmp_path: Path, move: str) -> None:
    (world, *sizes), (other_world, *other_sizes), kind = MOVES[move]
    weights, states = ranks.run_ranks(_train_and_save, world, str(tmp_path / "a"), kind, *sizes)[0]
    loaded = ranks.run_ranks(_load_and_save, other_world, str(tmp_path / "a"), str(tmp_path / "b"), kind, *other_sizes)[0]
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


@pytest.mark.slow  # fast: test_checkpoint_node_local.py
def test_disks_of_the_nodes(tmp_path: Path) -> None:
    ranks.run_ranks(check_disks, 4, str(tmp_path))


def check_disks(folder: str) -> None:
    """Two nodes; the ranks that hold the same experts are on both, or one rank has them alone; each reads what it wrote."""
    for stage, size in ((1, 2), (3, 2), (3, 4)):
        with on_node(folder, 2):
            run = with_experts(Run(stage, extra={"checkpoint": {"use_node_local_storage": True}}), size)
            model = _model("all")
            model.model.layers[0].mlp.experts.requires_grad_(False)
            engine = parity.initialize(model, run)
            parity.micro_step(engine, mixed(NAME)(0, 0, ranks.rank()), zoo.loss, 0)
            engine.save_checkpoint("run", f"{stage}{size}")
            wanted = parity.collect(engine, parity.Trace())
            parity.micro_step(engine, mixed(NAME)(1, 0, ranks.rank()), zoo.loss, 0)
            engine.load_checkpoint("run", f"{stage}{size}")
            found = parity.collect(engine, parity.Trace())
            assert len(list(Path(f"run/{stage}{size}").glob("master-*"))) == 4  # of two ranks, experts and all else
            for mine, theirs in ((found.weights, wanted.weights), (found.masters, wanted.masters)):
                assert mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())
            engine.destroy()


def _check_files(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """``save_16bit_model`` writes what ``_consolidated_16bit_state_dict`` returns, under transformers' own names."""
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    for key, value in stored.items():
        assert torch.equal(value, weights[key]), key
    assert any("experts" in key and value.dim() == (3 if TRANSFORMERS_5 else 2) for key, value in stored.items())
