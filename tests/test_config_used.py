"""A key that is called used is read by the code that builds engines, and one that is called accepted is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import hf_zero
from hf_zero.config.keys import all_keys

PACKAGE = Path(hf_zero.__file__).parent
CODE = "\n".join(
    path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")) if "config" not in path.relative_to(PACKAGE).parts
)
PLAIN = [key for key in all_keys().values() if not key.is_section and "*" not in key.path]


def attributes_read() -> set[tuple[str, str]]:
    """(name before the dot, attribute) of every attribute in the code: `self.config.fp16.enabled` gives (fp16, enabled) and more."""
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)]
    return {(node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", ""), node.attr) for node in nodes}


def last_two(path: str) -> tuple[str, str]:
    section, _, name = path.rpartition(".")
    return section.rpartition(".")[2], name


ATTRIBUTES = attributes_read()


@pytest.mark.parametrize("path", [key.path for key in PLAIN if key.fate == "used"])
def test_used_keys_are_read(path: str) -> None:
    assert re.search(rf"\b{last_two(path)[1]}\b", CODE), f"nothing outside hf_zero/config reads {path}"


@pytest.mark.parametrize("path", [key.path for key in PLAIN if key.fate == "accepted" and "." in key.path])
def test_accepted_keys_are_not_read(path: str) -> None:
    """As attributes of their section, `zero.reduce_bucket_size`; common names occur elsewhere with other meanings."""
    section, name = last_two(path)
    holders = {section, section.removesuffix("_optimization")}
    assert not holders & {before for before, attribute in ATTRIBUTES if attribute == name}, f"{path} is read, so it is not without effect"
