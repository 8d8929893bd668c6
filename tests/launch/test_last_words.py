"""What a launcher is told of a rank that fails, and how much the ranks print: the first failure, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launches import run_warm
from tests.support.processes import Ended

# Each piece of code is a rank: where torchrun puts the files of two ranks of a node, and what it tells them.
RANK = """
import os, sys, time
folder, name = os.path.dirname(sys.argv[1]), os.path.basename(sys.argv[1])
job, place = name.split("-")
os.makedirs(f"{folder}/errors/{job}/{place}", exist_ok=True)
os.environ.update(RANK=place, LOCAL_RANK=place, TORCHELASTIC_ERROR_FILE=f"{folder}/errors/{job}/{place}/error.json")
from hf_zero.errors import CollectiveError, ConfigError, StateError
from hf_zero.system import last_words
from hf_zero.system.last_words import report_to_launcher
last_words._PATIENCE_SECONDS = last_words._SETTINGS_SECONDS = 600.0  # a busy machine may take long until rank 0 has told
report_to_launcher()
report_to_launcher()
"""
NETWORK = "raise RuntimeError('[.../gloo/transport/tcp/pair.cc] Connection closed by peer')"
FAILURES = {
    "shared-0": "time.sleep(0.3)\nraise StateError('all ranks have this')",
    "shared-1": "raise StateError('all ranks have this')",
    "cause-0": "try:\n    " + NETWORK + "\nexcept RuntimeError as error:\n    raise CollectiveError('others are gone') from error",
    "cause-1": "raise ValueError('on purpose')",
    "key-0": "def deep():\n    raise ConfigError('a key\\nis wrong')\ndeep()",
    "key-1": "raise ConfigError('a key of this rank alone')",
    "ends-0": "raise KeyboardInterrupt",
    "ends-1": "sys.exit(3)",
    "stops-0": "raise KeyboardInterrupt",
    "stops-1": "while not os.path.exists(f'{folder}/errors/stops/0/error.json'):\n    time.sleep(0.01)\n" + NETWORK,
    "waits-1": "from hf_zero import observe\nobserve.set_long_wait('rank 1 waits. Not come: rank 0 is at a.py:1')\n" + NETWORK,
    "apart-0": "raise ValueError('the same words')",
    "apart-1": "\nraise ValueError('the same words')",
    "script-0": "raise ValueError('on all ranks')",
    "script-1": "raise ValueError('on all ranks')",
    "exits-0": "import threading\nthreading.Thread(target=sys.exit, args=('of a thread',)).start()\nsys.exit('the data is\\nmissing')",
    "exits-1": "exit(3)",
    "caught-0": "try:\n    sys.exit('caught')\nexcept SystemExit:\n    pass\nraise ValueError('after it')",
    "caught-1": "try:\n    sys.exit('caught')\nexcept SystemExit:\n    sys.exit()",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    codes = {name: RANK + code for name, code in FAILURES.items()}
    return run_warm(codes, tmp_path_factory.mktemp("ends"), "import torch, hf_zero.system.last_words")


def told(found: Ended) -> tuple[str, int]:
    """The message of an error file and its time, as torch reads them."""
    job, place = found.folder.name.split("-")
    path = Path(found.folder.parent, "errors", job, place, "error.json")
    message = json.loads(path.read_text())["message"]
    assert message["message"] in message["extraInfo"]["py_callstack"]
    return message["message"], int(message["extraInfo"]["timestamp"])


def test_an_error_of_all_ranks_is_printed_by_one(ended: dict[str, Ended]) -> None:
    assert told(ended["shared-0"])[0] == "StateError: all ranks have this" and "Traceback" in ended["shared-0"].err
    assert ended["shared-1"].err == "" and told(ended["shared-1"])[0] == "rank 1 ends with the same StateError as the first rank here"
    assert "Traceback" in ended["script-0"].err and ended["script-1"].err == "", "errors of a script as well"
    assert all("Traceback" in ended[name].err for name in ("apart-0", "apart-1")), "the same words at two places are two errors"
    assert told(ended["shared-1"])[1] > told(ended["shared-0"])[1]


def test_the_first_failure_is_that_of_the_rank_that_failed(ended: dict[str, Ended]) -> None:
    """Both within one second, and torch takes the earlier number."""
    assert told(ended["cause-1"])[0] == "ValueError: on purpose" and told(ended["cause-0"])[0] == "CollectiveError: others are gone"
    assert told(ended["cause-1"])[1] < told(ended["cause-0"])[1]
    assert "Traceback" in ended["cause-1"].err and "Traceback" not in ended["cause-0"].err, "only one of the two has a cause to show"
    assert "CollectiveError: others are gone" in ended["cause-0"].err


def test_a_collective_of_the_script_that_fails_tells_whom_it_waited_for(ended: dict[str, Ended]) -> None:
    reason = "Connection closed by peer. Before that, rank 1 waits. Not come: rank 0 is at a.py:1."
    assert told(ended["waits-1"])[0].endswith(reason) and reason in ended["waits-1"].err


def test_a_wrong_key_is_its_message_and_the_line_of_the_script(ended: dict[str, Ended]) -> None:
    found = ended["key-0"].err.splitlines()
    assert found[0].startswith("<script>:") and found[1:] == ["hf_zero.errors.ConfigError: a key", "is wrong"], found
    assert "a key of this rank alone" in ended["key-1"].err, "what one rank alone has to say is said"


def test_an_interruption_is_one_line_and_an_exit_none(ended: dict[str, Ended]) -> None:
    found = ended["ends-0"]
    assert found.err.startswith("[hf_zero] rank 0: interrupted in <script>, line") and found.err.count("\n") == 1, found
    assert ended["stops-1"].err == "" and ended["stops-1"].status != 0, "that the network has gone follows from the interruption"
    assert found.status != 0 and (ended["ends-1"].status, ended["ends-1"].err) == (3, "")


def test_the_reason_of_an_exit_is_told_with_its_line(ended: dict[str, Ended]) -> None:
    assert told(ended["exits-0"])[0] == "SystemExit: the data is\nmissing" and told(ended["exits-1"])[0] == "SystemExit: exit status 3"
    path = Path(ended["exits-0"].folder.parent, "errors", "exits", "0", "error.json")
    assert f'"<script>", line {RANK.count(chr(10)) + 3}' in json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
    assert (ended["exits-0"].status, ended["exits-0"].err) == (1, "the data is\nmissing\n") and ended["exits-1"].status == 3
    assert told(ended["caught-0"])[0] == "ValueError: after it", "the exit was caught, and something else ended the process"
    assert ended["caught-1"].status == 0 and not Path(ended["caught-1"].folder.parent, "errors", "caught", "1", "error.json").exists()
