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


def _logs(folder: Path, stage: int | None) -> list[float]:
    output = folder / f"out{stage}"
    words = [*("--max_steps", "3"), *("--logging_steps", "1"), *("--save_steps", "3"), *("--per_device_train_batch_size", "4")]
    words += ["--report_to", "none", "--learning_rate", "1e-3", "--output_dir", str(output)]
    if stage is None:
        words += ["--use_cpu", "True"]
    else:
        (folder / "ds.json").write_text(json.dumps(trainers.zero_config(stage)))
        words += ["--deepspeed", str(folder / "ds.json")]
    run_on_ranks(SCRIPT, str(folder / "model"), str(folder / "twins"), *words, HF_DATASETS_CACHE=str(folder / "cache"))
    history = json.loads((output / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
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
