"""What the pages name is there: files and folders of the repository, tests, notes, make targets, modules and commands."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from argparse import _SubParsersAction
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from hf_zero.cli import _parser
from tests.support.processes import REPO

PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").glob("*.md"), *(REPO / "examples").rglob("*.md")])
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]  # tells of what was there
ROOTS = ("hf_zero", "tests", "benchmarks", "examples", "docs", "kernels", "packaging", "tools")
# Files that a page names and that are not ours: of users, of libraries, and such as a run writes.
FOREIGN = {
    *("train.py", "script.py", "accelerate.py"),  # the user's
    *("sft.py", "dpo.py", "grpo.py", "reward.py", "kto.py", "rloo.py"),  # TRL's
    *("checkpoint-N/averaged/", "report.md", "comparison.md"),  # written by runs
    "Train/Experts/",  # names of metrics
}
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*(?:/|\.py|\.md|\.cpp|\.sh)")


def name_of(page: Path) -> str:
    return page.relative_to(REPO).as_posix()


@functools.cache
def files() -> tuple[PurePosixPath, ...]:
    """The files of the repository, as git has them; without git those that are there."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True)
    found = done.stdout.splitlines() if done.returncode == 0 else []
    names = found or [path.relative_to(REPO).as_posix() for root in ROOTS for path in (REPO / root).rglob("*") if path.is_file()]
    return tuple(PurePosixPath(name) for name in names if (REPO / name).exists())


@functools.cache
def exists(name: str) -> bool:
    """Tell whether a file or folder of this name, or of a path that ends so, is in the repository; ``*`` stands for anything but "/"."""
    if "/" in name.rstrip("/") and name.partition("/")[0] in ROOTS:
        pattern, anywhere = name, False
    else:
        pattern, anywhere = name, True
    text = re.escape(pattern.rstrip("/")).replace(r"\*", "[^/]*")
    whole = re.compile(("(?:.*/)?" if anywhere else "") + text + ("/.*" if pattern.endswith("/") else "(?:/.*)?"))
    return any(whole.fullmatch(str(path)) for path in files())


def spans(page: Path) -> list[str]:
    """Return the code in the lines of a page; that in blocks is looked at by tests/house/test_readme.py."""
    return SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def paths_in(span: str) -> Iterator[str]:
    """Yield the paths that a span is made of, if it is a path, a path with a name, or a command that runs one."""
    first, _, rest = span.partition(" ")
    if PATH.fullmatch(first.partition("::")[0]):
        yield first.partition("::")[0]
    if first in ("python", "torchrun", "bash"):
        yield from (word for word in rest.split() if PATH.fullmatch(word) and word.partition("/")[0] in ROOTS)


@functools.cache
def functions_of(name: str) -> frozenset[str]:
    """Return the names of the functions of a test file, assigned ones too."""
    tree = ast.parse((REPO / name).read_text(encoding="utf-8"))
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return frozenset({node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} | assigned)


@functools.cache
def notes() -> frozenset[str]:
    """Return the titles of notes in the sources."""
    text = "\n".join((REPO / path).read_text(encoding="utf-8") for path in files() if path.suffix in (".py", ".cpp", ".h"))
    return frozenset(" ".join(title.replace("#", " ").split()) for title in re.findall(r"\[Note: ([^\]]+)\]", text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    missing = {path for span in spans(page) for path in paths_in(span) if path not in FOREIGN and not exists(path)}
    assert not missing, f"{name_of(page)} names {sorted(missing)}, which are not in the repository: mend the page, or list them in FOREIGN"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    for span in spans(page):
        file, mark, name = span.partition("::")
        if mark and file.startswith("tests/"):
            assert exists(file), f"{name_of(page)}: {span}"
            assert name.partition("[")[0] in functions_of(file), f"{name_of(page)}: {span}"
        elif re.fullmatch(r"test_\w+", span):
            everywhere = (str(path) for path in files() if path.name.startswith("test_") and path.suffix == ".py")
            assert any(span in functions_of(path) or Path(path).stem == span for path in everywhere), f"{name_of(page)}: {span}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_that_stand_behind_a_file_are_in_it(page: Path) -> None:
    """As in `core/engine.py Engine`."""
    for span in spans(page):
        found = re.fullmatch(r"(\w[\w/]*\.py) (\w+)", span)
        if found and found[1] not in FOREIGN:
            texts = [(REPO / path).read_text(encoding="utf-8") for path in files() if str(path).endswith(found[1])]
            assert any(re.search(rf"\b{found[2]}\b", text) for text in texts), f"{name_of(page)}: {span}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_notes_that_a_page_refers_to_are_in_the_sources(page: Path) -> None:
    named = {" ".join(title.split()) for title in re.findall(r"\[Note: ([^\]]+)\]", page.read_text(encoding="utf-8"))}
    assert not named - notes()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_a_page_names_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+(?: [\w-]+)*):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    targets = {word for target in targets for word in target.split()}
    (commands,) = [action.choices for action in _parser()._actions if isinstance(action, _SubParsersAction)]
    text = page.read_text(encoding="utf-8")
    lines = [*spans(page), *(line.strip() for block in FENCE.findall(text) for line in block.splitlines())]
    for line in lines:
        words = line.split()
        if words[:1] == ["make"]:
            for word in words[1:2]:
                assert word in targets or not re.fullmatch(r"[\w-]+", word), f"{name_of(page)}: {line}"
        if words[:1] == ["hf-zero"]:
            for word in words[1:2]:
                assert word in commands or not re.fullmatch(r"[a-z][\w-]*", word), f"{name_of(page)}: {line}"
        for module in re.findall(r"\bpython -m ((?:hf_zero|tests|benchmarks|tools)[\w.]*)", line):
            assert exists(module.replace(".", "/") + ".py") or exists(module.replace(".", "/") + "/__main__.py"), f"{name_of(page)}: {line}"


def test_pages_say_the_same_number_of_architectures() -> None:
    """The generated table of docs/tensor-parallel.md has the number that other pages repeat."""
    table = (REPO / "docs" / "tensor-parallel.md").read_text(encoding="utf-8")
    (counted,) = re.findall(r"^(\d+) architectures of transformers [\d.]+, tiny", table, re.MULTILINE)
    repeated = {
        (name_of(page), number)
        for page in PAGES
        for number in re.findall(r"\b(\d+) text architectures\b|\bof (\d+) exact\b", page.read_text(encoding="utf-8"))
        for number in number
        if number
    }
    assert len(repeated) >= 2 and {number for _, number in repeated} == {counted}, repeated


def test_a_false_name_is_noticed() -> None:
    assert exists("hf_zero/cli.py") and exists("core/engine.py") and exists("core/") and exists("test_claims.py") and exists("*/zero3.json")
    assert (
        not exists("hf_zero/core/no_such.py") and not exists("core/no_such.py") and not exists("no_such/") and not exists("ore/engine.py")
    )
    assert list(paths_in("tests/a.py::test_b")) == ["tests/a.py"] and list(paths_in("python -m x")) == []
    assert list(paths_in("python benchmarks/no.py --x")) == ["benchmarks/no.py"] and list(paths_in("b s h e / N")) == []
