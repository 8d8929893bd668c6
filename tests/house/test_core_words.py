"""The core is torch's and ours: none of its lines names a framework whose API is served above it."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import REPO

CORE = REPO / "hf_zero" / "core"
BANNED = re.compile(r"deepspeed|(?<!gra)ds_|accelerate|transformers|trainer", re.IGNORECASE)


def test_the_core_names_no_framework() -> None:
    offenders = [
        f"{path.relative_to(CORE)}:{number}: {line.strip()}"
        for path in sorted(CORE.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if BANNED.search(line)
    ]
    assert not offenders


@pytest.mark.parametrize("line", ["as DeepSpeed does", "param.ds_id = 1", "import accelerate", "transformers' own", "class SFTTrainer:"])
def test_lines_that_are_found(line: str) -> None:
    assert BANNED.search(line)


@pytest.mark.parametrize("line", ["accelerator", "nn.TransformerEncoder", "clip_grads_with_norm_"])
def test_lines_that_are_not(line: str) -> None:
    assert not BANNED.search(line)
