"""Where the time of the tests goes: sums by file of pytest's report, the table of CONTRIBUTING.md, and the order of files that follows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tools import times_of_tests

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.core.test_a" name="test_x[1]" time="1.5"/><testcase classname="tests.core.test_a" name="test_x[2]" time="2.5"/>
<testcase classname="tests.parity.test_b.TestB" name="test_y" time="6"/><testcase classname="tests.house.test_c" name="test_z" time="0.5">
<properties><property name="shared seconds" value="4.5"/></properties></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "tests.xml"
    path.write_text(REPORT)
    return path


def test_seconds_are_summed_by_file_and_by_test(report: Path) -> None:
    seconds, counts = times_of_tests.seconds_by_file(report)
    assert seconds == {"core/test_a.py": 4.0, "parity/test_b.py": 6.0, "house/test_c.py": 0.5} and counts["core/test_a.py"] == 2
    assert times_of_tests.seconds_by_test(report)["core/test_a.py::test_x"] == 4.0
    lines = times_of_tests.table(seconds, counts, 2).splitlines()
    assert lines[2:] == ["| parity/test_b.py | 1 | 6 | 57.1 % |", "| core/test_a.py | 2 | 4 | 38.1 % |", "| 1 others | 1 | 0 | 4.8 % |"]
    report.write_text("<testsuites/>")
    with pytest.raises(ValueError, match="names no test"):
        times_of_tests.seconds_by_file(report)


def test_the_table_is_written_between_its_lines(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, faults = tmp_path / "page.md", tmp_path / "mutants.json"
    page.write_text(f"before\n{times_of_tests.START}\nold\n{times_of_tests.STOP}\nafter\n")
    faults.write_text('{"rows": []}')
    for name, value in {"PAGE": page, "DATA": tmp_path, "FAULTS": faults}.items():
        monkeypatch.setattr(times_of_tests, name, value)
    monkeypatch.setattr("sys.argv", ["times_of_tests", str(report), "--write"])
    assert times_of_tests.main() == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "| parity/test_b.py | 1 | 6 |" in text and "old" not in text
    assert json.loads((tmp_path / "seconds.json").read_text()) == {"core/test_a.py": 4.0, "house/test_c.py": 0.5, "parity/test_b.py": 6.0}
    assert json.loads((tmp_path / "long_tests.json").read_text()) == ["house/test_c.py::test_z", "parity/test_b.py::test_y"]
    page.write_text("no place for it")
    assert times_of_tests.main() == 1


def test_a_test_that_found_a_fault_is_not_long(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = tmp_path / "mutants.json"
    monkeypatch.setattr(times_of_tests, "LONG", 2.0)
    faults.write_text('{"rows": [["a fault", "core/a.py", "test_a.py::test_x[2]", "7"], ["another", "core/b.py", "", "7"]]}')
    assert times_of_tests.long_tests(report, faults) == ["house/test_c.py::test_z", "parity/test_b.py::test_y"]
    faults.write_text('{"rows": []}')
    assert times_of_tests.long_tests(report, faults) == ["core/test_a.py::test_x[2]", "house/test_c.py::test_z", "parity/test_b.py::test_y"]


def test_what_is_left_out_is_there() -> None:
    """A test that was renamed would run in ``make test``, whatever it takes."""
    tests = Path(conftest.__file__).parent
    for name in json.loads((tests / "data" / "long_tests.json").read_text(encoding="utf-8")):
        file, _, test = name.partition("::")
        assert re.search(rf"\b{test.partition('[')[0]}\b", (tests / file).read_text(encoding="utf-8")), name


def test_short_runs_leave_long_tests_out_and_say_so(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out: list[Any] = []
    options = {"short": True, "slow": True}
    config: Any = SimpleNamespace(
        args=[],
        option=pytestconfig.option,
        getoption=lambda name: options.get(name.strip("-")),
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    monkeypatch.setattr(conftest, "_long_tests", lambda: frozenset({"core/test_a.py::test_x[1]"}))
    names = ["tests/core/test_a.py::test_x[1]", "tests/core/test_a.py::test_x[2]", "tests/core/test_b.py::test_x[1]"]
    items: list[Any] = [SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: None) for name in names]
    conftest.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == names[1:] and [item.nodeid for item in left_out] == names[:1]
    assert "1 tests of several seconds are left out" in str(conftest.pytest_report_header(config))
    options["short"] = False
    assert conftest.pytest_report_header(config) is None


def test_the_longest_files_come_first_and_unknown_ones_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "__file__", str(tmp_path / "conftest.py"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "seconds.json").write_text('{"a.py": 1.0, "b.py": 30.0}')
    items: list[Any] = [SimpleNamespace(path=tmp_path / f"{name}.py", name=number) for number, name in enumerate("abcadcb")]
    conftest.longest_first(items)
    assert [(item.path.stem, item.name) for item in items] == [("c", 2), ("c", 5), ("d", 4), ("b", 1), ("b", 6), ("a", 0), ("a", 3)]
