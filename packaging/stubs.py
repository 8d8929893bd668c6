"""Write the type stubs beside the ``__init__.py`` files whose names load on first use, from their tables:

    python packaging/stubs.py

``__getattr__`` gives a type checker ``Any`` for every name. A stub names the module that defines each name, so that mypy, pyright and
editors know the signatures. A stub is used instead of an ``if TYPE_CHECKING`` block in the file itself, because a module that imports,
for type checking, a module that imports it again makes a circle, which tests/house/test_imports.py forbids. Standard library only; no
module of the package is imported.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAZY = ("hf_zero/__init__.py", "hf_zero/integrations/__init__.py", "hf_zero/optim/__init__.py")
_HEAD = "# Written by packaging/stubs.py from the table in __init__.py; a test compares them.\n"


def stub_of(path: Path) -> str:
    """Return the stub's text for a lazy ``__init__.py`` with ``_NAMES`` (name -> module) and maybe ``_MODULES`` and ``__version__``."""
    values = _literals(path)
    names: dict[str, str] = values["_NAMES"]
    modules = set(values.get("_MODULES", ()))
    lines = []
    for name, module in names.items():
        package, _, last = module.rpartition(".")
        lines.append(f"from {package} import {last} as {name}" if name in modules else f"from {module} import {name} as {name}")
    version = "__version__: str\n" if "__version__" in values else ""
    exported = [*(["__version__"] if version else []), *names]
    listed = "".join(f"    {name!r},\n" for name in exported).replace("'", '"')
    return _HEAD + "\n".join(sorted(lines)) + f"\n\n{version}__all__ = [\n{listed}]\n"


def stubs() -> dict[Path, str]:
    """Return the path and the text of every stub."""
    return {ROOT / name.replace(".py", ".pyi"): stub_of(ROOT / name) for name in LAZY}


def _literals(path: Path) -> dict[str, Any]:
    """Return the names that the module assigns a literal at its top level, with the values."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue  # not a literal
    return found


if __name__ == "__main__":
    for target, text in stubs().items():
        target.write_text(text, encoding="utf-8")
        print(target.relative_to(ROOT))
