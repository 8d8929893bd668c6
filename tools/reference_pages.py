"""Write the pages of the API reference and of the commands from the docstrings and the help of the code itself."""

from __future__ import annotations

import ast
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
ROOT = REPO / "hf_zero" / "__init__.py"
# Page -> title, and the public names of hf_zero on it.
PAGES = {
    "engine": ("Engine and set-up", ("initialize", "Engine", "init_distributed", "install_as_deepspeed")),
    "plugin": ("ZeroPlugin", ("ZeroPlugin", "DummyOptim", "DummyScheduler")),
    "training-arguments": ("ZeroTrainingArguments", ("ZeroTrainingArguments",)),
    "callbacks": ("Callbacks and Lightning", ("AveragedWeightsCallback", "ZeroStrategy", "FabricZeroStrategy")),
}
MODULES = {"zero": "hf_zero.zero", "utils": "hf_zero.utils", "optim": "hf_zero.optim", "errors": "hf_zero.errors"}
FIELDS = {"ZeroTrainingArguments"}  # dataclasses whose fields are listed
INHERITS = {"Engine"}  # classes whose page lists inherited methods, too


def assigned(path: Path, name: str) -> object:
    """Return the literal that a module assigns to ``name``.

    Raises:
        LookupError: The module assigns no such name.
    """
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} assigns no {name}")


def file_of(module: str) -> Path:
    """Return the file of a module of the package."""
    path = REPO.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def names_of(module: str) -> list[tuple[str, str]]:
    """Return the public names of a module, in order, each with the module that defines it.

    Without an ``__all__`` these are the module's own classes.
    """
    path = file_of(module)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    homes = {
        (alias.asname or alias.name): node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    try:
        served = assigned(path, "_NAMES")
    except LookupError:
        served = {}
    assert isinstance(served, dict)
    try:
        names = assigned(path, "__all__")
    except LookupError:
        names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert isinstance(names, list)
    return [(name, homes.get(name) or served.get(name) or module) for name in names]


def pages() -> dict[str, str]:
    """Return the Markdown of each page by its address; mkdocstrings replaces ``:::`` by the docstring.

    Raises:
        LookupError: A public name of the package has no page.
    """
    homes = assigned(ROOT, "_NAMES")
    assert isinstance(homes, dict)
    placed = {name for _, names in PAGES.values() for name in names} | MODULES.keys()
    if placed != homes.keys():
        raise LookupError(f"tools/reference_pages.py: these public names have no page, or are none: {sorted(placed ^ homes.keys())}")
    written = {}
    for address, (title, names) in PAGES.items():
        parts = [f"# {title}", *(_entry(homes[name], name) for name in names)]
        written[f"reference/{address}.md"] = "\n\n".join(parts) + "\n"
    for address, module in MODULES.items():
        entries = [_entry(home, name) for name, home in names_of(module) if name != "logger"]
        written[f"reference/{address}.md"] = "\n\n".join([f"# {module}", *entries]) + "\n"
    written["reference/commands.md"] = commands()
    return written


def _entry(module: str, name: str) -> str:
    options = ["    options:", "      show_root_toc_entry: true"]
    if name in FIELDS:
        options += ["      show_if_no_docstring: true"]
    if name in INHERITS:
        options += ["      inherited_members: true"]
    return "\n".join([f"::: {module}.{name}", *options])


def commands() -> str:
    """Return the page of the command line: the help texts of `hf-zero` and of each of its commands."""
    import os
    import sys
    from argparse import _SubParsersAction

    sys.path.insert(0, str(REPO))
    os.environ["COLUMNS"] = "100"
    os.environ["NO_COLOR"] = "1"
    from hf_zero.cli import _parser

    parser = _parser()
    parts = ["# Commands", "", "As `--help` prints it. `deepspeed` is `hf-zero launch` under the name of DeepSpeed's launcher.", ""]
    (choices,) = [action.choices for action in parser._actions if isinstance(action, _SubParsersAction)]
    for title, one in [("hf-zero", parser), *((f"hf-zero {name}", sub) for name, sub in choices.items())]:
        parts += [f"## {title}", "", "```text", one.format_help().rstrip(), "```", ""]
    return "\n".join(parts)
