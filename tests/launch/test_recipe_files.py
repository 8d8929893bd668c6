"""``hf-zero recipes``: the list, the files, and training with each kind of recipe on ranks of this machine."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_zero import recipes
from hf_zero.cli import main
from hf_zero.config.resolve import analyse
from tests.launch import recipe_train
from tests.support import chats
from tests.support.launches import launch_on_ranks, report_of
from tests.support.processes import REPO, run_python
from tests.support.rows import slow_but


def written(name: str, folder: Path, gpus: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two files of a recipe."""
    count = [] if gpus is None else ["--gpus", str(gpus)]
    assert main(["recipes", name, "--out", str(folder), *count]) == 0
    return json.loads((folder / "ds.json").read_text()), yaml.safe_load((folder / "accelerate.yaml").read_text())


def test_the_list_needs_no_torch() -> None:
    out = run_python(
        """
        import sys
        from hf_zero.cli import main
        assert main(["recipes"]) == 0
        print([name for name in ("torch", "yaml", "pydantic", "accelerate", "transformers") if name in sys.modules])
    """,
        env={"PYTHONPATH": str(REPO)},
    )
    assert out.rstrip().endswith("[]")
    for name in recipes.RECIPES:
        assert f"\n{name} " in out


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_the_configuration_is_understood_and_used(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, launcher = written(name, tmp_path)
    recipe = recipes.RECIPES[name]
    assert str(recipe.gpus) in name.split("-") and launcher["num_processes"] == recipe.gpus
    assert launcher["deepspeed_config"]["deepspeed_config_file"] == str(tmp_path / "ds.json")
    analysis = analyse(config, world_size=recipe.gpus, sources={"per_device_train_batch_size": 1}, strict=True)
    assert not analysis.problems.found, analysis.problems.report()
    out = capsys.readouterr().out
    (start,) = [line.removeprefix("start: ") for line in out.splitlines() if line.startswith("start: ")]
    assert start == recipes.command_of(recipe, tmp_path / "accelerate.yaml")
    (check,) = [line.removeprefix("check: hf-zero ") for line in out.splitlines() if line.startswith("check: ")]
    assert main([*shlex.split(check), "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["warnings"] == [] and {row["fate"] for row in explained["keys"]} <= {"used", "mapped"}


def test_without_a_folder_the_files_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "moe-8", "--gpus", "4"]) == 0
    out = capsys.readouterr().out
    config, launcher = out.partition("# ds.json\n")[2].split("\n\n# accelerate.yaml\n")
    assert json.loads(config)["expert_parallel"] == {"enabled": True, "autoep_size": 4}
    assert yaml.safe_load(launcher)["num_processes"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "4"], "--gpus and --out need the NAME"),
        (["full-8", "--gpus", "0"], "--gpus is 0; full-8 needs 1 or more"),
        (["long-8", "--gpus", "1"], "--gpus is 1; long-8 needs 2 or more"),
        (["nodes-16", "--gpus", "5"], "nodes-16 needs 4 or more, a multiple of its 2 machines"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", *words]) == 1
    assert said in capsys.readouterr().err


def test_files_are_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written("full-8", tmp_path)
    before = (tmp_path / "ds.json").read_text()
    assert main(["recipes", "lora-1", "--out", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err and (tmp_path / "ds.json").read_text() == before


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    chats.save(folder)
    return folder


def _mixture(folder: Path) -> Path:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    MixtralForCausalLM(MixtralConfig(vocab_size=64, num_local_experts=4, num_experts_per_tok=2, **sizes)).save_pretrained(folder)
    return folder


def _words(command: str, **more: Any) -> list[str]:
    """The words of the printed command behind ``train.py``, and what toy sizes and a machine without GPU need."""
    given = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "report_to": "none", **more}
    return [
        *shlex.split(command.partition("train.py ")[2]),
        "--use_cpu",
        *(word for key, value in given.items() for word in (f"--{key}", str(value))),
    ]


@pytest.mark.parametrize("name", slow_but(["full-8", "full-8-offload", "long-8", "moe-8", "nodes-16"], "full-8"))
def test_a_recipe_trains_on_trainer(name: str, toys: Path, tmp_path: Path) -> None:
    recipe = recipes.RECIPES[name]
    world = 4 if recipe.nodes > 1 else 2
    written(name, tmp_path / "files", world)
    launcher = tmp_path / "files" / "accelerate.yaml"
    model = _mixture(tmp_path / "model") if recipe.experts else toys / "model"
    words = _words(recipes.command_of(recipe, launcher), model_name_or_path=model, output_dir=tmp_path / "out", save_strategy="no")
    # The ranks of both machines are on this one.
    flags = ["--num_machines", "1"] if recipe.nodes > 1 else []
    found = report_of(launch_on_ranks(launcher, Path(recipe_train.__file__), *words, world=world, flags=flags))
    assert found["stage"] == recipe.stage and len(found["losses"]) == 2 and all(0 < loss < 10 for loss in found["losses"])
    assert found["config"]["bf16"] == {"enabled": True} and found["config"]["train_micro_batch_size_per_gpu"] == 2
    assert list((tmp_path / "out").glob("model*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full-1", "lora-1", "lora-8", "qlora-1", "qlora-8"])
def test_a_recipe_trains_with_the_script_of_trl(name: str, toys: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    recipe = recipes.RECIPES[name]
    if recipe.task == "qlora":
        pytest.importorskip("bitsandbytes")
    written(name, tmp_path / "files", 2)
    launcher = tmp_path / "files" / "accelerate.yaml"
    script = tmp_path / "scripts" / "sft.py"
    script.parent.mkdir()
    shutil.copy(Path(trl.__file__).parent / "scripts" / script.name, script)
    words = _words(
        recipes.command_of(recipe, launcher),
        model_name_or_path=toys / "model",
        dataset_name=toys / "chats",
        output_dir=tmp_path / "out",
        max_length=32,
        save_steps=2,
    )
    launch_on_ranks(launcher, script, *words, HF_DATASETS_CACHE=str(tmp_path / "cache"))
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    trained = [entry for entry in state["log_history"] if "loss" in entry]
    assert len(trained) == 2 and all(entry["grad_norm"] > 0.0 for entry in trained)
    saved = "model" if recipe.task == "full" else "adapter_model"
    assert list((tmp_path / "out" / "checkpoint-2").glob(f"{saved}*.safetensors"))


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPO / "docs" / "recipes.md").read_text()
    assert main(["recipes"]) == 0
    assert f"```text\n{capsys.readouterr().out}```" in page
    for name in recipes.RECIPES:
        assert f"`{name}`" in page, name
