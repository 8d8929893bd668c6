"""sentence-transformers' trainer with a DeepSpeed file: the logs of DDP, and a folder that loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import chats, trainers
from tests.support.launches import run_on_ranks
from tests.support.processes import REPO

pytest.importorskip("sentence_transformers")

SCRIPT = REPO / "tests" / "support" / "scripts" / "sentence_pairs.py"


def _train(folder: Path, stage: int | None, *more: str) -> Path:
    """Train on 2 ranks, with DDP if ``stage`` is None; return the output folder."""
    output = folder / f"out{stage}"
    words = [*("--max_steps", "3"), *("--logging_steps", "1"), *("--save_steps", "3"), *("--per_device_train_batch_size", "4")]
    words += ["--report_to", "none", "--learning_rate", "1e-3", "--output_dir", str(output)]
    if stage is None:
        words += ["--use_cpu", "True"]
    else:
        (folder / "ds.json").write_text(json.dumps(trainers.zero_config(stage)))
        words += ["--deepspeed", str(folder / "ds.json")]
    run_on_ranks(SCRIPT, str(folder / "model"), str(folder / "twins"), *words, *more, HF_DATASETS_CACHE=str(folder / "cache"))
    return output


def _logs(folder: Path, stage: int | None) -> list[float]:
    history = json.loads((_train(folder, stage) / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in history for key in ("loss", "grad_norm") if key in entry]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_pairs_of_texts(stage: int, tmp_path: Path) -> None:
    chats.save(tmp_path)
    expected = _logs(tmp_path, None)
    assert len(expected) == 6 and _logs(tmp_path, stage) == pytest.approx(expected, rel=1e-3)
    plain, found = (load_file(tmp_path / out / "checkpoint-3" / "model.safetensors") for out in ("outNone", f"out{stage}"))
    assert plain.keys() == found.keys() and any(name.endswith("embed_tokens.weight") for name in plain)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=3e-4)


@pytest.mark.slow
def test_the_best_model_is_loaded_at_stage_3(tmp_path: Path) -> None:
    """A run whose first checkpoint counts as the best ends with the weights of this checkpoint, as under DDP."""
    chats.save(tmp_path)
    more = ("--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "1", "--load_best_model_at_end", "True")
    more += ("--metric_for_best_model", "eval_loss", "--greater_is_better", "True")  # the loss falls
    plain, found = (load_file(_train(tmp_path, stage, *more) / "final" / "model.safetensors") for stage in (None, 3))
    first, last = (load_file(tmp_path / "outNone" / f"checkpoint-{step}" / "model.safetensors") for step in (1, 3))
    assert plain.keys() == found.keys()
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=3e-4)
        torch.testing.assert_close(first[name], value)
    assert any((first[name] - last[name]).abs().max() > 1e-3 for name in first)
