"""Scripts of others as they are, under `accelerate launch` with their own YAML: the logs of plain DDP, and what they save."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.support import chats
from tests.support.launches import launch_on_ranks
from tests.support.processes import REPO

STEPS = 2
# On a CPU transformers takes bf16 only where accelerate is told to leave devices alone, which would switch ZeRO off.
COMMON = {
    "bf16": False,
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_steps": 1,
    "report_to": "none",
    "learning_rate": 1e-3,
}
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
FOUR_BIT = {"load_in_4bit": True, "use_bnb_nested_quant": True}
SHORT = {"max_length": 48}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
GROUPS = {"num_generations": 2, "max_completion_length": 6, "temperature": 1e-3, "reward_funcs": "tests.support.chats.distinct_words"}
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
# Name -> the script, its data, its words, what is in the folder at the end.
SCRIPTS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "sft": ("sft", "chats", {**SHORT, **EVALUATED, "packing": True}, WEIGHTS),
    "sft lora": ("sft", "chats", {**SHORT, **LORA}, ADAPTER),
    "sft qlora": ("sft", "chats", {**SHORT, **LORA, **FOUR_BIT}, ADAPTER),
    "dpo": ("dpo", "pairs", {**SHORT, **EVALUATED, "no_remove_unused_columns": True}, WEIGHTS),
    "dpo qlora": ("dpo", "pairs", {**SHORT, **LORA, **FOUR_BIT}, ADAPTER),
    "reward": ("reward", "pairs", SHORT, WEIGHTS),
    "kto": ("kto", "labelled", SHORT, WEIGHTS),
    "grpo": ("grpo", "prompts", {**GROUPS, "beta": 0.1}, WEIGHTS),
    "grpo lora": ("grpo", "prompts", {**GROUPS, **LORA, "beta": 0.1}, ADAPTER),
    "grpo qlora": ("grpo", "prompts", {**GROUPS, **LORA, **FOUR_BIT}, ADAPTER),
    "rloo": ("rloo", "prompts", GROUPS, WEIGHTS),
}
PEFT_EXAMPLE: dict[str, dict[str, Any]] = {
    "whole": {},
    "lora": {"use_peft_lora": True},
    "qlora": {"use_peft_lora": True, "use_4bit_quantization": True, "use_nested_quant": True, "gradient_checkpointing": True},
    "qlora stored as fp32": {"use_peft_lora": True, "use_4bit_quantization": True, "bnb_4bit_quant_storage_dtype": "float32"},
    "int8": {"use_peft_lora": True, "use_8bit_quantization": True},
}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    chats.save(folder)
    return folder


def launcher(stage: int | None) -> Path:
    """TRL's own file for a stage; None is its plain one, for several processes."""
    trl = pytest.importorskip("trl")
    return Path(trl.__file__).parent / "accelerate_configs" / ("multi_gpu.yaml" if stage is None else f"zero{stage}.yaml")


def words_of(options: dict[str, Any]) -> list[str]:
    """A command line: flags that are true stand alone."""
    return [word for key, value in options.items() for word in ([f"--{key}"] if value is True else [f"--{key}", str(value)])]


def logs(script: Path, stage: int | None, folder: Path, options: dict[str, Any]) -> list[dict[str, float]]:
    """What a run of the script logged; its checkpoints and files are in ``folder``."""
    given = {**COMMON, **options, "output_dir": folder}
    environment = {"HF_DATASETS_CACHE": str(folder.parent / "cache")}
    if stage is None:
        given["use_cpu"], environment["ACCELERATE_USE_CPU"] = True, "true"
    launch_on_ranks(launcher(stage), script, *words_of(given), flags=["--num_processes", "2", "--mixed_precision", "no"], **environment)
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [{key: entry[key] for key in ("loss", "grad_norm", "eval_loss", "reward") if key in entry} for entry in state["log_history"]]


def same_logs(script: Path, stage: int, folder: Path, options: dict[str, Any], saved: str) -> None:
    """The script's logs at a stage are those of plain DDP, and it has saved what it should."""
    options = {**options, "gradient_accumulation_steps": 1 if stage == 1 else 2}  # zero1.yaml has it
    expected = logs(script, None, folder / "ddp", options)
    found = logs(script, stage, folder / f"stage{stage}", options)
    assert len(found) == len(expected) >= STEPS
    # Adapters on a quantized base are bf16, and DDP takes the norm of their gradients in it: 8 bits of mantissa.
    quantized = {"load_in_4bit", "use_4bit_quantization", "use_8bit_quantization"} & options.keys()
    rel = 2**-7 if quantized else 1e-3
    for left, right in zip(expected, found, strict=True):
        assert left.keys() == right.keys() and right == pytest.approx(left, rel=rel, abs=2e-4)
    # Two completions that are almost certain are alike: their gradients cancel, and what can differ is the reward.
    assert any(entry.get("reward" if "temperature" in options else "grad_norm", 0.0) > 0.0 for entry in found)
    files, plain = ({path.name: _shapes(path) for path in (folder / name).glob("*.safetensors")} for name in (f"stage{stage}", "ddp"))
    assert files == plain and set(files) == {saved} and files[saved]


def _shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping


def _copied(name: str, folder: Path) -> Path:
    """TRL's script, unchanged, in a folder of its own: modules that come from a script's folders are forgotten after each run."""
    trl = pytest.importorskip("trl")
    target = folder / "scripts" / f"{name}.py"
    target.parent.mkdir()
    shutil.copy(Path(trl.__file__).parent / "scripts" / target.name, target)
    return target


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("sft", 1), *itertools.product(SCRIPTS, (2, 3))])
def test_scripts_of_trl(name: str, stage: int, toys: Path, tmp_path: Path) -> None:
    script, data, options, saved = SCRIPTS[name]
    model = toys / ("reward" if script == "reward" else "model")
    same_logs(_copied(script, tmp_path), stage, tmp_path, {"model_name_or_path": model, "dataset_name": toys / data, **options}, saved)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", PEFT_EXAMPLE)
def test_the_example_of_peft(name: str, stage: int, toys: Path, tmp_path: Path) -> None:
    script = REPO / "tests" / "support" / "scripts" / "peft_sft.py"
    options = {"model_name_or_path": toys / "model", "dataset_name": toys / "chats", **SHORT, **EVALUATED, **PEFT_EXAMPLE[name]}
    same_logs(script, stage, tmp_path, options, ADAPTER if "use_peft_lora" in options else WEIGHTS)
