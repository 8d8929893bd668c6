"""The package's files and their imports, for tests that read sources."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.support.processes import REPO

PACKAGE = REPO / "hf_zero"


@functools.cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPO).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path, *, top_level_only: bool) -> set[str]:
    """Return the names of modules that a file imports, without type-checking blocks."""
    nodes = tree_of(path).body if top_level_only else list(ast.walk(tree_of(path)))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found
