"""Hugging Face's Trainer with ``expert_parallel``: losses, evaluation, the saved model, resuming without it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.errors import StateError
from tests.support import ranks
from tests.support.experts import build, with_adapters
from tests.support.tp_trainer import EVALUATED, arguments, losses, norms, rows, zero_config

NAME = "MixtralForCausalLM"


def test_trainer_trains_as_without_and_saves_the_whole_model(tmp_path: Path) -> None:
    ranks.run_ranks(check_trainer, 2, str(tmp_path), group=False)


@pytest.mark.slow  # fast: test_expert_adapters.py
def test_trainer_saves_adapters_of_experts(tmp_path: Path) -> None:
    ranks.run_ranks(check_adapters, 2, str(tmp_path), group=False)


def check_adapters(folder: str) -> None:
    """LoRA on experts that are divided trains and is saved as LoRA on whole ones."""
    from safetensors.torch import load_file

    place, found = Path(folder), {}
    for size, stage in ((2, 3), (1, 2)):
        trainer = _trainer(place / f"run{size}", stage, size, adapted=True)
        trainer.train()
        trainer.save_model(str(place / f"{size}"))
        dist.barrier()
        found[size] = losses(trainer), norms(trainer), load_file(place / f"{size}" / "adapter_model.safetensors")
    for mine, theirs in zip(found[2][:2], found[1][:2], strict=True):
        _close(mine, theirs)
    saved, other = found[2][2], found[1][2]
    assert saved.keys() == other.keys() and any("experts" in name for name in saved)
    assert all((value - other[name]).abs().mean() < 1e-4 for name, value in saved.items())


def _trainer(folder: Path, stage: int, size: int, seed: int = 0, adapted: bool = False, **options: Any) -> Any:
    from transformers import Trainer

    config = {**zero_config(stage, 1), "expert_parallel": {"enabled": size > 1, "autoep_size": size}}
    args = arguments(str(folder), config, **options)
    model = build(NAME, {"use_cache": False, "output_router_logits": True})
    if adapted:
        model = with_adapters(model, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    if seed:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.1)
    return Trainer(model=model, args=args, train_dataset=rows(), eval_dataset=rows(EVALUATED))


def check_trainer(folder: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    place = Path(folder)
    with_experts = _trainer(place / "run", 2, 2, save_strategy="steps", save_steps=2)
    with_experts.train()
    evaluated = with_experts.evaluate()["eval_loss"]
    if ranks.rank() == 0:  # the others were given nothing when the Trainer saved, and write nothing
        with pytest.raises(StateError, match="this rank has only slices of the model"):
            with_experts.model.save_pretrained(folder)
    else:
        assert with_experts.model.save_pretrained(folder) is None
    with_experts.save_model(str(place / "with"))
    whole = with_experts.deepspeed._consolidated_16bit_state_dict()
    without = _trainer(place / "other", 2, 1)
    without.train()
    without.save_model(str(place / "without"))
    dist.barrier()
    _close(losses(with_experts), losses(without))
    _close(norms(with_experts), norms(without))
    _close([evaluated], [without.evaluate()["eval_loss"]])
    resumed = _trainer(place / "again", 3, 1, seed=1)
    resumed.train(resume_from_checkpoint=str(place / "run" / "checkpoint-2"))
    _close(losses(resumed)[-2:], losses(with_experts)[-2:])
    unset_hf_deepspeed_config()
    saved = AutoModelForCausalLM.from_pretrained(place / "with").state_dict()
    other = AutoModelForCausalLM.from_pretrained(place / "without").state_dict()
    assert saved.keys() == other.keys()
    for name, value in saved.items():
        assert whole is None or torch.equal(value, whole[name]), name
        assert (value - other[name]).abs().mean() < 1e-4, name  # Adam moves elements whose gradient is rounding noise


def _close(found: list[float], expected: list[float]) -> None:
    assert found and len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert math.isclose(mine, theirs, rel_tol=1e-4), (found, expected)
