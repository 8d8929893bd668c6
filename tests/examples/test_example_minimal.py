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

FOLDER = EXAMPLES / "minimal"
SCRIPTS = sorted(FOLDER.glob("*.py"))
LOSS = re.compile(r"(?:'loss': '|loss )([0-9.]+)")


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


@pytest.mark.timeout(TEST_SECONDS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_minimal_script_learns_and_leaves_a_model(script: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [str(script) if script.name in word else word for word in command_of(script)]
    printed = processes.run(command, cwd=tmp_path, timeout=RUN_SECONDS)
    losses = [float(loss) for loss in LOSS.findall(printed)]
    assert losses[0] > 5 and losses[-1] < losses[0] - 1

    folder = tmp_path / "runs" / "minimal" / script.stem
    assert f"'{folder.relative_to(tmp_path)}'" in printed
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if script.stem == "lora":
        from peft import AutoPeftModelForCausalLM

        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)  # the adapters name their base relative to where the script ran
            model = AutoPeftModelForCausalLM.from_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokenizer("The Python language reference", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model.eval()(input_ids=tokens, labels=tokens).loss.item()
    assert loss < losses[0] - 1, "the saved weights are not the trained ones"
