"""What type checkers and editors see of the public names: signatures, so that a misspelt argument is an error before anything runs.

The checkers read the minimal examples as well, in which they must find nothing. `make lint` runs mypy's part, whose cache it has filled.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.examples import EXAMPLES
from tests.support.processes import REPO

# Every line that is marked must be reported, and no other. A name without a type would let all of them by.
SCRIPT = """
import hf_zero
import torch
from hf_zero import ZeroPlugin, ZeroTrainingArguments
from hf_zero.integrations import DummyOptim
from hf_zero.optim import Lion, OneBitAdam

number: int = hf_zero.initialize  # error
ZeroPlugin(stage=3, offload_optimizer="cpu", zero3_init_flag=False)
ZeroPlugin(stag=3)  # error
ZeroPlugin(stage=4)  # error
ZeroPlugin(stage=3, zero3_init_flg=False)  # error
ZeroTrainingArguments(output_dir="out", zero_stage=3, bf16=True, learning_rate=1e-4)
ZeroTrainingArguments(output_dir="out", zero_stge=3)  # error
ZeroTrainingArguments(output_dir="out", zero_stage="three")  # error

model = torch.nn.Linear(2, 2)
engine, optimizer, loader, scheduler = hf_zero.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
hf_zero.initialize(module=model)  # error
loss: torch.Tensor = engine(torch.ones(2)).sum()
engine.backward(loss)
engine.step()
engine.step(lr_kwarg={})  # error
engine.save_checkpoint("out", tagg="a")  # error
with hf_zero.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
    pass
hf_zero.zero.GatheredParameters(list(model.parameters()), modifier=0)  # error
hf_zero.utils.safe_get_full_grad(model.weight)
hf_zero.utils.safe_get_full_gradient(model.weight)  # error
text: str = hf_zero.__version__
hf_zero.Initialize  # error
OneBitAdam(model.parameters(), lr=1e-3)
OneBitAdam(model.parameters(), learning_rate=1e-3)  # error
Lion(model.parameters(), lr=1e-3)
Lion(model.parameters(), rate=1e-3)  # error
DummyOptim(list(model.parameters()), lr=1e-3)
try:
    hf_zero.init_distributed()
except hf_zero.errors.ConfigError as error:
    print(error)
"""
WRONG = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# error")]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """With copies of the examples beside it."""
    path = tmp_path / "typed_script.py"
    path.write_text(SCRIPT)
    for example in (EXAMPLES / "minimal").glob("*.py"):
        shutil.copy(example, tmp_path)
    return path


def lines_of_mypy(script: Path) -> list[int]:
    """With the project's settings, whose cache `make lint` has filled."""
    flags = ["--no-pretty", "--no-error-summary", "--allow-untyped-defs", "--allow-untyped-calls"]  # examples have few annotations
    command = [sys.executable, "-m", "mypy", *flags, *map(str, sorted(script.parent.glob("*.py")))]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=1100)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(\S+):(\d+): error: ", done.stdout, re.MULTILINE)
    assert {Path(name).name for name, _ in found} <= {script.name}, done.stdout
    return sorted({int(line) for _, line in found})


def lines_of_pyright(script: Path) -> list[int]:
    """With pyright's own rules; what basedpyright adds to them is left out."""
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(REPO)], "include": ["*.py"]}
    (script.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(script.parent)]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=1100)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [one for one in json.loads(done.stdout)["generalDiagnostics"] if one["severity"] == "error"]
    assert {Path(one["file"]).name for one in found} <= {script.name}, found
    return sorted({one["range"]["start"]["line"] + 1 for one in found})


@pytest.mark.slow  # a checker without a cache reads torch and transformers as well
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_wrong_calls_are_errors_and_right_ones_are_none(checker: str, script: Path) -> None:
    pytest.importorskip(checker, reason="comes with the extra dev")
    assert {"mypy": lines_of_mypy, "basedpyright": lines_of_pyright}[checker](script) == WRONG


@pytest.mark.quick
def test_stubs_name_what_the_tables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "packaging"))
    stubs = importlib.import_module("stubs").stubs()
    for path, text in stubs.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python packaging/stubs.py"
    # A package that serves its names so and has no stub is hollow again.
    lazy = {path for path in (REPO / "hf_zero").rglob("__init__.py") if "\ndef __getattr__(" in path.read_text(encoding="utf-8")}
    assert {path.with_suffix(".pyi") for path in lazy} == stubs.keys()


def test_options_of_the_plugin_are_those_that_accelerate_takes() -> None:
    from accelerate.utils import DeepSpeedPlugin

    from hf_zero.integrations.accelerate_plugin import PluginOptions

    # The plugin has a parameter of its own for each of these.
    own = {
        "hf_ds_config",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_stage",
        "offload_optimizer_device",
        "offload_param_device",
    }
    fields = {field.name for field in dataclasses.fields(DeepSpeedPlugin) if field.init}
    assert PluginOptions.__optional_keys__ == fields - own
