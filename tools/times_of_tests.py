"""Report the seconds that each test file takes, from pytest's report, for the table in CONTRIBUTING.md.

    make test LONG=1 TEST_ARGS="--junitxml=build/tests.xml"
    python -m tools.times_of_tests build/tests.xml               # the 25 longest files
    python -m tools.times_of_tests build/tests.xml --tests 40    # the 40 longest tests
    python -m tools.times_of_tests build/tests.xml --write       # the table of CONTRIBUTING.md, and the data in tests/data

The seconds are the wall-clock time of set-up, call and tear-down of each test, so their sum is the length of the run times its number of
processes. ``tests/conftest.py`` sorts files by ``seconds.json``: several processes end together only if the longest files begin first.
``long_tests.json`` names the tests that ``make test`` leaves out and CI runs: those of LONG seconds and more, unless they were the first
to find a planted fault (``tools.mutants``). Write the data on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "CONTRIBUTING.md"
DATA = REPOSITORY / "tests" / "data"
FAULTS = REPOSITORY / "benchmarks" / "results" / "mutants.json"
LONG = 3.0  # seconds
START, STOP = "<!-- times: made by python -m tools.times_of_tests -->", "<!-- end of times -->"


def seconds_by_file(report: Path) -> tuple[dict[str, float], Counter[str]]:
    """Return the seconds and the number of tests of each file.

    Args:
        report: The XML file of ``pytest --junitxml``.

    Raises:
        ValueError: The report names no test.
    """
    seconds, counts = defaultdict[str, float](float), Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = _file_of(case.get("classname", ""))
        seconds[name] += float(case.get("time", "0"))
        counts[name] += 1
    if not counts:
        raise ValueError(f"{report} names no test; write it with pytest --junitxml={report}")
    return seconds, counts


def seconds_by_test(report: Path) -> dict[str, float]:
    """Return the seconds of each test, all its parameters together."""
    seconds = defaultdict[str, float](float)
    for case in ElementTree.parse(report).iter("testcase"):
        name = re.sub(r"\[.*", "", case.get("name", ""), flags=re.S)
        seconds[f"{_file_of(case.get('classname', ''))}::{name}"] += float(case.get("time", "0"))
    return seconds


def long_tests(report: Path, faults: Path) -> list[str]:
    """Return the tests, each with its parameters, that take at least ``LONG`` seconds, or share fixtures that do.

    A test that was the first to find a planted fault is none of them.

    Args:
        report: The XML file of ``pytest --junitxml``.
        faults: The table of ``tools.mutants``: its third column names the first test that found a fault.
    """
    telling = {row[2] for row in json.loads(faults.read_text(encoding="utf-8"))["rows"]}
    long = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{_file_of(case.get('classname', ''))}::{case.get('name')}"
        shared = sum(float(entry.get("value", "0")) for entry in case.iter("property") if entry.get("name") == "shared seconds")
        if max(shared, float(case.get("time", "0"))) >= LONG and name.rpartition("/")[2] not in telling:
            long.append(name)
    return sorted(long)


def _longest(seconds: dict[str, float], length: int) -> list[tuple[str, float]]:
    """Return the entries with the most seconds, longest first."""
    return sorted(seconds.items(), key=lambda entry: -entry[1])[:length]


def _file_of(classname: str) -> str:
    """Return the path of a test's file, below ``tests/``."""
    names = classname.split(".")
    last = next((index for index, name in enumerate(names) if name.startswith("test_")), len(names) - 1)
    return "/".join(names[1 : last + 1]) + ".py"


def table(seconds: dict[str, float], counts: Counter[str], length: int) -> str:
    """Return the table of the longest files as Markdown; the last row sums up all other files."""
    total = sum(seconds.values())
    lines = ["| file in `tests/` | tests | seconds | share |", "|---|---|---|---|"]
    longest = _longest(seconds, length)
    for name, spent in longest:
        lines.append(f"| {name} | {counts[name]} | {spent:.0f} | {100 * spent / total:.1f} % |")
    rest = total - sum(spent for _, spent in longest)
    others = len(seconds) - len(longest)
    tests = sum(counts.values()) - sum(counts[name] for name, _ in longest)
    lines.append(f"| {others} others | {tests} | {rest:.0f} | {100 * rest / total:.1f} % |")
    return "\n".join(lines)


def main() -> int:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="XML of pytest --junitxml")
    parser.add_argument("--length", type=int, default=25, help="number of files")
    parser.add_argument("--tests", type=int, default=0, help="print this many tests instead")
    parser.add_argument("--write", action="store_true", help="write the table of CONTRIBUTING.md and the data in tests/data")
    arguments = parser.parse_args()
    if arguments.tests:
        for name, spent in _longest(seconds_by_test(arguments.report), arguments.tests):
            print(f"{spent:8.1f}  {name}")
        return 0
    seconds, counts = seconds_by_file(arguments.report)
    text = table(seconds, counts, arguments.length)
    if not arguments.write:
        print(text)
        return 0
    page = PAGE.read_text(encoding="utf-8")
    if START not in page or STOP not in page:
        print(f"{PAGE} has no lines {START!r} and {STOP!r}: the table belongs between them", file=sys.stderr)
        return 1
    before, after = page.split(START)[0], page.split(STOP)[1]
    by_file = {name: round(spent, 1) for name, spent in sorted(seconds.items())}
    for name, data in {"seconds.json": by_file, "long_tests.json": long_tests(arguments.report, FAULTS)}.items():
        (DATA / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(f"{before}{START}\n\n{text}\n\n{STOP}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
