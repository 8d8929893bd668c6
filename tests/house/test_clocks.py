"""No test may depend on how fast the machine is: none compares a measured time, and none ends what is only slow.

A test waits for an event (``tests.support.processes.until``), counts what happens, or moves a clock of its own. What is forbidden here:
``assert`` on a value that comes from a clock in the same function, and limits below a minute.
"""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.support.processes import REPO

CLOCKS = {
    "monotonic",
    "perf_counter",
    "process_time",
    "thread_time",
    "time",
    "monotonic_ns",
    "perf_counter_ns",
    "process_time_ns",
    "time_ns",
}
LIMITS = ("timeout", "group_timeout", "seconds")
LEAST_SECONDS = 60.0
# Most files have neither, and are not parsed.
TIMED = re.compile(r"\btime\.|monotonic|perf_counter|process_time|thread_time|time_ns")
LIMITED = re.compile(rf"\b({'|'.join(LIMITS)})\s*=")
RUNNERS = {"run", "run_ranks", "observe_ranks", "run_alone", "run_python", "run_forked", "communicate", "start", "spawn"}
# Functions, each with the reason.
MEASURES = {
    "tests/fuzz/bounded.py: bounded_time": "a minute of this process' own time, a thousand times of what is usual: tells n from n squared",
}
SHORT = {
    "tests/comm/test_gathers_over_nodes.py: test_a_rank_that_is_gone_fails_the_gather_on_the_others": "expects that it runs out",
    "tests/comm/test_ranks.py: test_a_hung_rank_shows_its_stack": "expects that it runs out",
}


@functools.cache
def files() -> dict[str, str]:
    """Return the sources of the tests by path."""
    return {path.relative_to(REPO).as_posix(): path.read_text(encoding="utf-8") for path in sorted((REPO / "tests").rglob("*.py"))}


@functools.cache
def functions() -> dict[str, ast.AST]:
    """Return the functions of files that name a clock or a limit, by file and name, methods and nested ones too."""
    found: dict[str, ast.AST] = {}
    for path, text in files().items():
        if not TIMED.search(text) and not LIMITED.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{path}: {node.name}"
                while name in found:
                    name += " again"
                found[name] = node
    return found


def reads_clock(node: ast.AST) -> bool:
    """Return whether a node calls a clock: ``time.monotonic()``, or ``monotonic()``."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return isinstance(node.func.value, ast.Name) and node.func.value.id == "time" and node.func.attr in CLOCKS
    return isinstance(node.func, ast.Name) and node.func.id in CLOCKS - {"time"}


def measured_asserts(function: ast.AST) -> list[int]:
    """Return the lines of the asserts that compare a clock's value, or a name that was assigned from one."""
    names: set[str] = set()

    def measured(node: ast.AST) -> bool:
        return any(reads_clock(part) or (isinstance(part, ast.Name) and part.id in names) for part in ast.walk(node))

    for _ in range(2):  # a name may be used before the line that assigns it, in a loop
        for node in ast.walk(function):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None and measured(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and any(isinstance(part, ast.Compare) and measured(part) for part in ast.walk(node.test)):
            found.append(node.lineno)
    return found


def short_limits(function: ast.AST) -> list[int]:
    """Return the lines of calls that run ranks or processes with a limit below a minute, written as a number."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in RUNNERS:
            values = {word.arg: word.value for word in node.keywords if word.arg in LIMITS}
            numbers = [value.value for value in values.values() if isinstance(value, ast.Constant)]
            found += [node.lineno for number in numbers if isinstance(number, (int, float)) and number < LEAST_SECONDS]
    return found


def test_no_assert_compares_a_measured_time() -> None:
    timed = {path for path, text in files().items() if TIMED.search(text)}
    read = {name: function for name, function in functions().items() if name.partition(": ")[0] in timed}
    found = {name: lines for name, function in read.items() if (lines := measured_asserts(function))}
    assert found.keys() == MEASURES.keys(), f"wait for an event, count, or move a clock of your own: {found}"


def test_no_limit_ends_what_is_only_slow() -> None:
    found = {name: lines for name, function in functions().items() if (lines := short_limits(function))}
    assert found.keys() == SHORT.keys(), f"leave out the limit: {found}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("begin = time.monotonic()\n    work()\n    assert time.monotonic() - begin < 5", 1),
        ("begin = perf_counter()\n    took = perf_counter() - begin\n    assert work() and took < 5", 1),
        ("began = time.time()\n    while True:\n        assert late <= 3\n        late = time.time() - began", 1),
        ("deadline = time.monotonic() + 5\n    while time.monotonic() < deadline:\n        assert work()", 0),
        ("assert clock.now() < 5 and time.strftime('%Y') > '2020'", 0),
    ],
)
def test_what_a_measured_assert_is(text: str, found: int) -> None:
    assert len(measured_asserts(ast.parse(f"def test() -> None:\n    {text}"))) == found
