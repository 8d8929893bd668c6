"""Trainer with ``hf_zero.checkpoint_url``: a machine with an empty disk goes on from the store, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks, trainers
from tests.support.stores import objects

LINEAR = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}


def _trainer(models: Path, folder: Path, config: dict[str, Any], **options: Any) -> Any:
    from transformers import Trainer

    trainers.forget()
    args = trainers.arguments(folder, config, **LINEAR, **options)
    model = trainers.load(models, "gpt2", resid_pdrop=0.1)
    return Trainer(model=model, args=args, train_dataset=trainers.rows(24, 1))


def _resume(models: Path, folder: Path) -> None:
    from hf_zero.utils import newest_trainer_checkpoint

    url = f"file://{folder}/store"
    config = trainers.zero_config(3, hf_zero={"checkpoint_url": url})
    with trainers.clean_state():
        assert newest_trainer_checkpoint(folder / "first", url) is None
        whole = _trainer(models, folder / "first", config)
        whole.train()
        weights = trainers.weights_of(whole.model)
        torch.distributed.barrier()
        assert newest_trainer_checkpoint(folder / "first") == newest_trainer_checkpoint(folder / "first", url)
        if ranks.rank() == 0:
            (folder / "store" / "checkpoint-6" / "trainer_state.json").unlink()  # as if it had been killed before the end of its save
        torch.distributed.barrier()
        found = newest_trainer_checkpoint(folder / "second", url)
        assert found == str(folder / "second" / "checkpoint-4")
        resumed = _trainer(models, folder / "second", config)
        resumed.train(resume_from_checkpoint=found)
        left, right = trainers.logs_of(whole), trainers.logs_of(resumed)
        assert repr(left) == repr(right), f"{left}\n{right}"
        again = trainers.weights_of(resumed.model)
        assert all(torch.equal(value, again[name]) for name, value in weights.items())


@pytest.mark.slow  # fast: test_checkpoint_stores.py
def test_an_empty_disk_goes_on_from_the_store(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_resume, 2, trainer_models, tmp_path)
    local = objects(tmp_path / "first")
    assert "checkpoint-6/global_step6/checkpoint_url.txt" in local and "checkpoint-6/model.safetensors" in local
    assert not any("master" in name for name in local), "the engine's files are in the store alone"
    stored = objects(tmp_path / "store")
    assert {name.partition("/")[0] for name in stored} == {"checkpoint-4", "checkpoint-6"}, "save_total_limit holds there too"
    for name in ("rng_state_0.pth", "rng_state_1.pth", "trainer_state.json", "latest", "global_step6/complete"):
        assert f"checkpoint-6/{name}" in stored
    assert not any(name.endswith("/model.safetensors") for name in stored)
