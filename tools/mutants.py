"""Check that the tests find faults: plant one fault after the other in a copy of the package, and run the tests that should fail.

    python -m tools.mutants                                              # all faults, about half an hour
    python -m tools.mutants --only "one micro-step too many" --json benchmarks/results/mutants.json
    python -m tools.mutants --check                                      # does every fault's line still exist?

A fault is found when a test fails, or is still running after the time limit (some faults cause a hang). Only a few test files run per
fault, in order, so a fault that is not found may still be found by the whole suite.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.tables import ResultTable  # noqa: E402
from tools.mutant_faults import FAULTS, Fault  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("hf_zero", "tests", "kernels", "examples", "benchmarks", "tools", "docs", "pyproject.toml", "README.md", "_hf_zero_startup.py")
TEXT = """Each row is one wrong line in a copy of the package. **found by** is the first test that failed ("time": tests were still
running after {limit} s); an empty cell is a fault that no test found. {found} of {all} were found."""


def wrong_places(faults: tuple[Fault, ...] = FAULTS) -> list[str]:
    """Return a line for each fault whose text is not in its file exactly once, with the number of times it is."""
    wrong = []
    for fault in faults:
        path = ROOT / "hf_zero" / fault.file
        count = path.read_text().count(fault.old) if path.is_file() else 0
        missing = [test for test in fault.tests if not (ROOT / test).is_file()]
        if count != 1 or missing:
            wrong.append(f"{fault.file}: {fault.name}: {count} times" + (f"; no {', '.join(missing)}" if missing else ""))
    return wrong


def found_by(fault: Fault, folder: Path, limit: float) -> str:
    """Return the first test that fails with the fault in the copy at ``folder``; "time" if one exceeds ``limit``, "" if none fails."""
    path = folder / "hf_zero" / fault.file
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "TEST_PATIENCE": "1"}
    try:
        for test in fault.tests:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", test]
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                return "time"
            finally:
                _end(process)
            if process.returncode:
                names = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                return names[0] if names else f"{test} (does not start)"
    finally:
        path.write_text(text)
    return ""


def _end(process: subprocess.Popen[str]) -> None:
    """End the tests and every rank they have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names of faults, or of files")
    parser.add_argument("--check", action="store_true", help="only look whether every fault fits the sources")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one file of tests")
    parser.add_argument("--json", type=Path, help="keep the table in this file, which python -m tools.render reads")
    arguments = parser.parse_args()
    wrong = wrong_places()
    if wrong or arguments.check:
        print("\n".join(wrong) or f"all {len(FAULTS)} faults fit")
        return bool(wrong)
    chosen = [fault for fault in FAULTS if not arguments.only or fault.name in arguments.only or fault.file in arguments.only]
    console, rows = Console(), []
    with tempfile.TemporaryDirectory(prefix="mutants_") as scratch:
        folder = Path(scratch)
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / name)
        for fault in chosen:
            started = time.monotonic()
            by = found_by(fault, folder, arguments.limit)
            rows.append((fault.name, fault.file, by.rpartition("/")[2], f"{time.monotonic() - started:.0f}"))
            console.print(f"{'found' if by else 'NOT FOUND':9}  {fault.file}: {fault.name}  [{by}]", markup=False, highlight=False)
    found = sum(bool(row[2]) for row in rows)
    text = TEXT.format(limit=arguments.limit, found=found, all=len(rows))
    table = ResultTable(
        "Planted faults",
        "python -m tools.mutants --json benchmarks/results/mutants.json",
        text,
        ("fault", "module", "found by", "s"),
        rows,
    )
    table.publish(arguments.json)
    return found < len(rows)


if __name__ == "__main__":
    sys.exit(main())
