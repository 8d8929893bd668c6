"""A house one can live in: no file, class or function grows until nobody reads it whole."""

from __future__ import annotations

import ast

from tests.support.sources import imports_of, modules, tree_of

FILE_LINES = 500
FUNCTION_LINES = 80  # its docstring included
# Stands alone beside checkpoints, so what it needs is in one file.
LONGER = {"hf_zero.checkpoint.zero_to_fp32": 637}
CLASS_METHODS = 30
MODULE_LINES = 60  # fewer are a closet where one other module uses them
# Small modules that stand apart, and why.
APART = {
    "hf_zero.integrations.packed_loads": "imported late: every program that loads a model imports its neighbour",
    "hf_zero.profiling.trace_command": "the command line starts without torch",
}
ALIAS = "hf_zero.deepspeed."  # a file for each module of DeepSpeed that the alias serves by name
# Classes that stand for somebody else's: their methods are that interface.
MIRRORS = {"hf_zero.deepspeed.served.accelerator.TorchAccelerator"}


def test_no_file_is_too_long() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert not {name: length for name, length in lengths.items() if length > LONGER.get(name, FILE_LINES)}


def test_no_class_has_too_many_methods_and_no_function_needs_scrolling() -> None:
    classes: dict[str, int] = {}
    functions: dict[str, int] = {}
    for name, path in modules().items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                classes[f"{name}.{node.name}"] = sum(isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) for part in node.body)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions[f"{name}:{node.lineno} {node.name}"] = (node.end_lineno or node.lineno) - node.lineno + 1
    assert {name for name, count in classes.items() if count > CLASS_METHODS} == MIRRORS
    assert not {name: length for name, length in functions.items() if length > FUNCTION_LINES}


def test_no_small_module_serves_one_other_alone() -> None:
    """A file worth opening has a subject of its own; a small one with a single importer belongs into that one."""
    importers: dict[str, set[str]] = {}
    for name, path in modules().items():
        for target in imports_of(path, top_level_only=False):
            if target in modules() and target != name:
                importers.setdefault(target, set()).add(name)
    closets = {
        name
        for name, path in modules().items()
        if path.name != "__init__.py" and len(path.read_text(encoding="utf-8").splitlines()) < MODULE_LINES
        if len(users := importers.get(name, set()) - {name.rpartition(".")[0]}) == 1 and not name.startswith(ALIAS)
        if not next(iter(users)).startswith(ALIAS)
    }
    assert closets == APART.keys()
