"""SECURITY.md is true line by line: each promise names the tests that hold it, and these are there and run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.guard import SLOW
from tests.support.processes import REPO

PAGE = (REPO / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
WITH_PROMISES = ("Code and sizes", "Messages", "Files", "The network is trusted", "The start-up hook")


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"SECURITY.md has no section {title}"
    return found[1]


def promises() -> list[str]:
    """The items of the lists of these sections."""
    found = [item for title in WITH_PROMISES for item in re.split(r"^- ", section(title), flags=re.MULTILINE)[1:]]
    return [item.partition("\n\n")[0] for item in found]


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: re.sub(r"\W+", "_", promise[:40]))
def test_each_promise_names_its_tests(promise: str) -> None:
    assert NAMED.search(promise), "name the test that holds it, as `tests/file.py::name`"


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED.findall(PAGE))))
def test_what_holds_a_promise_is_there_and_is_collected(file: str, name: str) -> None:
    """As pytest collects: a function whose name begins with test, in a file whose name does, which is not skipped on every machine."""
    path = REPO / file
    assert path.is_file() and path.name.startswith("test_") and name.startswith("test_")
    module = importlib.import_module(".".join(path.relative_to(REPO).with_suffix("").parts))
    test: Any = getattr(module, name)
    assert callable(test) and getattr(module, "__test__", True) and getattr(test, "__test__", True)
    marks = [*getattr(test, "pytestmark", []), *_listed(getattr(module, "pytestmark", []))]
    assert not [mark for mark in marks if mark.name in ("skip", "xfail", "gpu")]
    assert not [mark for mark in marks if mark.name == "slow"], "a promise is held by a test that CI runs"


def _listed(marks: Any) -> list[Any]:
    return list(marks) if isinstance(marks, (list, tuple)) else [marks]


def test_no_list_of_promises_is_outside_of_these_sections() -> None:
    inside = sum(len(re.findall(r"^- ", section(title), re.MULTILINE)) for title in WITH_PROMISES)
    assert len(re.findall(r"^- ", PAGE, re.MULTILINE)) == inside == len(promises()) > 20


def test_what_the_page_says_of_the_checks_is_so() -> None:
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    audit = re.search(r"^audit:.*?\n(.*?)\n\n", makefile, re.MULTILINE | re.DOTALL)
    assert audit is not None
    for word in ("bandit", "detect-secrets-hook", "pip check", "--slow tests/fuzz"):
        assert word in audit[1]
    assert "pip-audit" in makefile[makefile.index("advisories:") :]
    assert SLOW >= 3000 and "3,000 for each reader" in PAGE
    for named in re.findall(r"`(tests/[\w/.]+?)(?:::\w+)?`", PAGE):
        assert Path(REPO, named).exists(), named
    for named in re.findall(r"`(test_\w+\.py)`", section("How it is tested")):
        assert list(REPO.glob(f"tests/*/{named}")), named
