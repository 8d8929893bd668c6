"""Text that needs no network: the docstrings of the installed Python's standard library, parsed and never run."""

from __future__ import annotations

import ast
import functools
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from common.arguments import FlagError

# Third-party code is not part of Python, and tests and demos are hardly prose: what is left is the same on every machine with this Python.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"})
SENTENCE_END = re.compile(r"(?<=[.!?])\s")

Item = TypeVar("Item")


@dataclass(frozen=True)
class Function:
    """A documented function: its signature on one line, and the first sentence of its docstring."""

    signature: str
    summary: str


@dataclass(frozen=True)
class Documentation:
    """What stands in the docstrings of some files."""

    texts: list[str] = field(default_factory=list)  # whole docstrings
    functions: list[Function] = field(default_factory=list)  # special methods (``__eq__``) left out
    descriptions: list[str] = field(default_factory=list)  # first sentences about modules and classes


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Python files of the standard library, sorted, without tests and installed packages.

    Args:
        root: Folder to look in; None is the standard library of the running interpreter.
    """
    root = library_root() if root is None else root
    files = (path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1]))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def library_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def parse(source: bytes) -> Documentation:
    """Docstrings of a module, its classes and functions in the order of the file; the code is parsed, never run.

    Files that this Python cannot parse (templates, other syntax) hold nothing.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return Documentation()
    found = Documentation()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if not text:
            continue
        found.texts.append(text)
        sentence = first_sentence(text)
        if sentence and isinstance(node, (ast.Module, ast.ClassDef)):
            found.descriptions.append(sentence)
        elif sentence and not (node.name.startswith("__") and node.name.endswith("__")):
            found.functions.append(Function(f"def {node.name}({ast.unparse(node.args)})", sentence))
    return found


def first_sentence(text: str) -> str:
    """First sentence of a docstring on one line; empty where its first paragraph holds no two words."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    sentence = SENTENCE_END.split(paragraph)[0]
    return sentence if len(sentence.split()) > 1 else ""


@functools.lru_cache(maxsize=1)
def standard_library(root: Path) -> Documentation:
    """All docstrings of the library under ``root``; parsed once per process.

    Raises:
        FlagError: The interpreter comes without the sources of its library.
    """
    found = Documentation()
    for path in standard_library_files(root):
        part = parse(path.read_bytes())
        found.texts.extend(part.texts)
        found.functions.extend(part.functions)
        found.descriptions.extend(part.descriptions)
    if not found.functions:
        raise FlagError(
            f"No docstrings found under {root}: this Python has no library sources. Give --train_file, or the name of a dataset on the hub."
        )
    return found


def standard_library_text(root: Path | None = None, end_of_text: str = "") -> list[str]:
    """All docstrings of the standard library, each on lines of its own, followed by ``end_of_text``."""
    return [f"{text}\n{end_of_text}" for text in standard_library(root or library_root()).texts]


def standard_library_functions(root: Path | None = None) -> list[Function]:
    """All documented functions of the standard library, special methods and repetitions left out."""
    return list(dict.fromkeys(standard_library(root or library_root()).functions))


def standard_library_descriptions(root: Path | None = None) -> list[str]:
    """First sentences about all modules and classes of the standard library, repetitions left out."""
    return list(dict.fromkeys(standard_library(root or library_root()).descriptions))


def split_items(items: Sequence[Item], held_out_percent: int) -> tuple[list[Item], list[Item]]:
    """Hold out items spread evenly over the list, the same ones every time.

    Args:
        items: Documents in a fixed order.
        held_out_percent: Share to hold out, 1 to 99.

    Returns:
        Items to train on and items held out, both in the order of ``items``.
    """
    held_out = [(index * held_out_percent) // 100 != ((index + 1) * held_out_percent) // 100 for index in range(len(items))]
    train = [item for item, held in zip(items, held_out, strict=True) if not held]
    return train, [item for item, held in zip(items, held_out, strict=True) if held]
