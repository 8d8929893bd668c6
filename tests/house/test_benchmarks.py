"""The benchmarks have an index, start in one way, and lie in folders that one can overlook."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.processes import REPO

FOLDER = REPO / "benchmarks"
MOST_FILES = 20
CHANGES_THE_PATH = {"common/run_worker.py", "collectives/onebit_convergence.py", "experiments/compare_sft.py", "experiments/measured.py"}


def scripts() -> dict[str, Path]:
    """Return the modules that run as scripts and are no rank of another one, by the name behind ``python -m``."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text and not path.stem.endswith("_worker") and path.stem != "measured":
            parts = path.relative_to(REPO).with_suffix("").parts
            found[".".join(parts).removesuffix(".__main__")] = path
    return found


def test_every_benchmark_has_a_row_of_the_index_and_every_row_a_benchmark() -> None:
    rows = re.findall(r"^\| `python -m (\S+)` \| .+ \| .+ \|$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(scripts())


def test_documented_commands_are_those_of_the_index() -> None:
    for path in scripts().values():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert "python benchmarks/" not in text, f"{path}: python -m, from the root of the repository"


def test_no_folder_has_more_files_than_one_can_overlook() -> None:
    for folder in (FOLDER, *(path for path in FOLDER.iterdir() if path.is_dir() and path.name != "results")):
        files = [path for path in folder.iterdir() if path.is_file() and path.suffix in (".py", ".sh")]
        assert len(files) <= MOST_FILES, f"{folder}: {len(files)} files"


def test_nothing_else_changes_where_modules_are_found() -> None:
    found = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py") if "sys.path" in _code(path)}
    assert found == CHANGES_THE_PATH


def _code(path: Path) -> str:
    """Return a file's statements without comments and texts that are documentation."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return "\n".join(ast.unparse(node) for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)))
