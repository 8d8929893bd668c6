"""The rules of docs/architecture.md: imports go one way, collectives stand in one place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "hf_zero"

# First matching prefix decides; a module may import modules of its own layer (cycles are looked for separately) and lower ones.
LAYERS = [
    ("hf_zero.errors", 0),
    ("hf_zero.observe", 0),
    ("hf_zero.metrics", 1),
    ("hf_zero.config", 1),
    ("hf_zero.comm", 1),
    ("hf_zero.sharding", 2),
    ("hf_zero.optim", 3),
    ("hf_zero.checkpoint", 3),
    ("hf_zero.engine.loss_scale", 2),
    ("hf_zero.engine", 4),
    ("hf_zero.zero", 5),
    ("hf_zero.utils", 5),
    ("hf_zero", 6),
]
COLLECTIVES = re.compile(
    r"\bdist\.(all_gather\w*|all_reduce\w*|reduce\w*|broadcast\w*|all_to_all\w*|scatter\w*|gather\w*|isend|irecv|send|recv|barrier)\("
)


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules() -> dict[str, ast.Module]:
    return {_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def _imports(tree: ast.Module, known: dict[str, ast.Module]) -> set[str]:
    """Modules of the package imported at top level, type-checking blocks left out."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
    return {name for name in found if name in known}


def _layer(name: str) -> int:
    return next(layer for prefix, layer in LAYERS if name == prefix or name.startswith(prefix + "."))


TREES = _modules()
GRAPH = {name: _imports(tree, TREES) for name, tree in TREES.items()}


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_imports_go_one_way(name: str) -> None:
    upwards = sorted(other for other in GRAPH[name] if _layer(other) > _layer(name))
    assert not upwards, f"{name} (layer {_layer(name)}) imports {upwards}"


def test_no_cycle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for other in GRAPH[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in GRAPH:
        visit(name, ())


def test_nothing_imports_the_package_root() -> None:
    allowed = {name for name in GRAPH if name.startswith(("hf_zero.compat", "hf_zero.integrations", "hf_zero.cli", "hf_zero.environment"))}
    assert not sorted(name for name, imports in GRAPH.items() if "hf_zero" in imports and name not in allowed and name != "hf_zero")


def test_collectives_stand_in_one_file() -> None:
    offenders = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if COLLECTIVES.search(path.read_text()) and _name(path) not in ("hf_zero.comm.collectives", "hf_zero.compat.comm")
    ]
    assert not offenders, f"torch.distributed collectives outside comm/collectives.py: {offenders}"


def test_process_groups_are_created_in_topology() -> None:
    pattern = re.compile(r"\b(new_group|init_process_group|init_device_mesh)\(")
    offenders = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if pattern.search(path.read_text()) and _name(path) != "hf_zero.comm.topology"
    ]
    assert not offenders, f"process groups created outside comm/topology.py: {offenders}"
