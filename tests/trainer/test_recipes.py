"""The recipes of docs/fine-tuning.md: every printed command with its printed configuration, at toy size."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import chats
from tests.support.launches import run_on_ranks
from tests.support.processes import REPO

PAGE = (REPO / "docs" / "fine-tuning.md").read_text().split("\n## Recipes\n")[1].split("\n## ")[0]
FILES = dict(re.findall(r"^`(ds_\w+\.json)`:.*?```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [block.replace("\\\n", " ").strip() for block in re.findall(r"^```bash\n(torchrun.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
DATA = {"trl-lib/Capybara": "chats", "trl-lib/ultrafeedback_binarized": "pairs", "trl-lib/DeepMath-103K": "prompts"}
# Toy sizes, given after the printed words, which they replace.
SMALL = {
    "sft": {"max_length": 32},
    "dpo": {"max_length": 32},
    "grpo": {"max_completion_length": 4, "per_device_train_batch_size": 4, "num_generations": 4},
}
ALL = {"max_steps": 2, "save_steps": 2, "logging_steps": 1, "report_to": "none", "bf16": False}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    chats.save(folder)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def toy_words(command: str, toys: Path, output: Path) -> tuple[str, int, list[str]]:
    """The script's name, at most two of the printed ranks, and the script's words with a toy model, toy data and toy sizes."""
    launcher, _, rest = command.partition("$SCRIPTS/")
    ranks = int(re.findall(r"--nproc_per_node (\d+)", launcher)[0])
    script, *words = shlex.split(rest)
    given: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            given[word[2:]] = True
        else:
            given[next(reversed(given))] = word
    given["deepspeed"] = toys / given["deepspeed"]
    given["dataset_name"] = toys / DATA[given["dataset_name"]]
    name = script.removesuffix(".py")
    given |= {"model_name_or_path": toys / "model", "output_dir": output, **SMALL[name], **ALL}
    return (
        name,
        min(ranks, 2),
        [text for key, value in given.items() for text in ([f"--{key}"] if value is True else [f"--{key}", str(value)])],
    )


def test_the_page_has_recipes() -> None:
    assert len(COMMANDS) == 9 and {re.findall(r"\$SCRIPTS/(\w+)", command)[0] for command in COMMANDS} == SMALL.keys()
    assert FILES.keys() == {re.findall(r"--deepspeed (\S+)", command)[0] for command in COMMANDS}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_a_recipe_runs_as_printed(number: int, toys: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    name, world, words = toy_words(COMMANDS[number], toys, tmp_path / "out")
    script = tmp_path / "scripts" / f"{name}.py"
    script.parent.mkdir()
    shutil.copy(Path(trl.__file__).parent / "scripts" / script.name, script)
    run_on_ranks(script, *words, world=world, HF_DATASETS_CACHE=str(tmp_path / "cache"))
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    trained = [entry for entry in state["log_history"] if "loss" in entry]
    assert len(trained) == 2 and all(entry["grad_norm"] >= 0.0 for entry in trained)
    assert name == "grpo" or all(entry["grad_norm"] > 0.0 for entry in trained)
    saved = "adapter_model" if "--use_peft" in words else "model"
    assert (tmp_path / "out" / f"{saved}.safetensors").is_file()
