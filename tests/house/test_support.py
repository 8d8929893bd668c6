"""The helpers of the tests have an index, and each of them somebody who uses it."""

from __future__ import annotations

import ast
import re

from tests.support.processes import REPO

FOLDER = REPO / "tests" / "support"
IMPORTED = re.compile(r"^ *from tests\.support import (\([^)]*\)|[^(\n]*)", re.MULTILINE)


def modules() -> list[str]:
    """Return the names of the modules of ``tests/support``."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def test_every_helper_has_one_line_of_the_index() -> None:
    text = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text(encoding="utf-8"))) or ""
    lines = re.findall(r"^    ((?:\w+, )*\w+): [A-Z].*\.$", text, re.MULTILINE)
    assert sorted(name for line in lines for name in line.split(", ")) == modules()


def test_every_helper_is_used() -> None:
    used: set[str] = set()
    for path in [*(REPO / "tests").rglob("*.py"), *(REPO / "benchmarks").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        used |= {
            name for name in re.findall(r"tests\.support\.(\w+)", text) if path != FOLDER / f"{name}.py"
        }  # imports, and texts that name one
        for names in IMPORTED.findall(text):
            used |= {alias.name for node in ast.parse(f"from here import {names}").body for alias in node.names}  # type: ignore[attr-defined]
    assert not set(modules()) - used
