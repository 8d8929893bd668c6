"""The rank processes that the benchmarks start: answers in rank order, what a rank printed when it ends, no rank left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.processes import RankProcesses

WORKER = """
import json, os, sys, time
from benchmarks.common.processes import open_answers
answers = open_answers()
print("a library prints")
answers.write(json.dumps({"pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"], "words": sys.argv[1:]}) + "\\n")
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "end":
        sys.exit("told to end")
    if request["do"] == "sleep":
        time.sleep(60)
    answers.write(json.dumps({"rank": os.environ["RANK"], "world": os.environ["WORLD_SIZE"]}) + "\\n")
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[RankProcesses]:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    processes = RankProcesses("two", worker, ["text", {"key": 1}], 2, OMP_NUM_THREADS=3)
    yield processes
    processes.stop(0.0)
    for answer in processes.first:
        with pytest.raises(ProcessLookupError):
            os.kill(answer["pid"], 0)


def test_ranks_answer_in_order(started: RankProcesses) -> None:
    assert [(one["threads"], one["words"]) for one in started.first] == [("3", ["text", '{"key": 1}'])] * 2
    for _ in range(2):
        assert started.ask(do="answer") == [{"rank": "0", "world": "2"}, {"rank": "1", "world": "2"}]


def test_a_rank_that_ends_is_told_with_what_it_printed(started: RankProcesses) -> None:
    with pytest.raises(RuntimeError, match=r"two: a rank ended with code 1(.|\n)*told to end"):
        started.ask(do="end")


def test_a_rank_that_does_not_answer_is_given_up(started: RankProcesses) -> None:
    with pytest.raises(RuntimeError, match="two: a rank does not answer"):
        started.ask(0.2, do="sleep")
