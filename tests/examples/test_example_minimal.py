"""The minimal scripts: each is one short file, starts as its head says, learns, and leaves a model that `from_pretrained` loads."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.support import processes
from tests.support.examples import EXAMPLES, RUN_SECONDS, TEST_SECONDS
from tests.support.launches import run_on_ranks
from tests.support.versions import TRANSFORMERS_5

FOLDER = EXAMPLES / "minimal"
SCRIPTS = sorted(FOLDER.glob("*.py"))
LOSS = re.compile(r"(?:'loss': '?|loss )([0-9.]+)")
STEPS = re.compile(r"(?<=STEPS = 64, )100|(?<=max_steps=)\d+")


def command_of(script: Path) -> list[str]:
    """Words of the command in the script's head."""
    (line,) = [line for line in (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines() if script.name in line]
    return shlex.split(line)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_minimal_script_is_one_short_file(script: Path) -> None:
    source = script.read_text()
    assert 40 <= len(source.splitlines()) <= 80
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    ours = {path.stem for path in FOLDER.iterdir()} | {path.name for path in FOLDER.parents[1].iterdir()}
    assert {name.split(".")[0] for name in names} & ours == {"hf_zero"}


def test_no_script_of_the_folder_hides_a_library() -> None:
    hidden = {"accelerate", "transformers", "torch", "peft", "deepspeed", "datasets", "hf_zero"}
    assert not hidden & {script.stem for script in SCRIPTS}


def _check(script: Path, printed: str, cwd: Path) -> None:
    """Check that a run in ``cwd`` has learned, and that its model loads and has the trained weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses = [float(loss) for loss in LOSS.findall(printed)]
    assert losses[0] > 5 and losses[-1] < losses[0] - 1

    folder = cwd / "runs" / "minimal" / script.stem
    assert f"'{folder.relative_to(cwd)}'" in printed
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if script.stem == "lora":
        from peft import AutoPeftModelForCausalLM

        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)  # the adapters name their base relative to where the script ran
            model = AutoPeftModelForCausalLM.from_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokenizer("The Python language reference", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model.eval()(input_ids=tokens, labels=tokens).loss.item()
    assert loss < losses[0] - 1, "the saved weights are not the trained ones"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_copy_with_fewer_steps_learns_and_leaves_a_model(script: Path, tmp_path: Path) -> None:
    """Run it on ranks of the pool, which have imported everything; it logs its first and its last step."""
    if script.stem == "long_sequences" and not TRANSFORMERS_5:
        pytest.skip("transformers 4 does not offload the inputs of checkpoints")
    text, changed = STEPS.subn("20", script.read_text())
    assert changed == 1
    copy = tmp_path / "scripts" / script.name
    copy.parent.mkdir()
    copy.write_text(text.replace("save_steps=50", "save_steps=10"))
    _check(script, run_on_ranks(copy, folder=tmp_path), tmp_path)


@pytest.mark.slow  # `test_launch_nodes.py` and `test_exit_status.py` start ranks by these launchers
@pytest.mark.timeout(TEST_SECONDS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_minimal_script_learns_and_leaves_a_model(script: Path, tmp_path: Path) -> None:
    command = [str(script) if script.name in word else word for word in command_of(script)]
    _check(script, processes.run(command, cwd=tmp_path, timeout=RUN_SECONDS), tmp_path)
