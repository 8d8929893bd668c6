"""What a process ends with when the last save in the background was lost, and that nothing else of its end changes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import REPO, Ended, environment, run_forked

SCRIPT = """
import atexit, os, sys, threading, time, torch, hf_zero
from hf_zero.checkpoint import save
atexit.register(lambda: print("handler before", flush=True))
model = torch.nn.Linear(4, 4)
config = {"train_batch_size": 1, "checkpoint": {"writer": {"decoupled": True}}}
engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
original = save.write_tensor_file

def full(path, entries, **options):
    time.sleep(0.3)
    raise OSError(28, "No space left on device", str(path))

folder = sys.argv[1]
engine.save_checkpoint(folder, "first")
engine.wait_for_checkpoint()
save.write_tensor_file = full
engine.save_checkpoint(folder, "second")
unflushed = open(folder + "/log", "w")
unflushed.write("the last line")
atexit.register(lambda: print("handler after", flush=True))
"""
LOST = re.compile(
    r"saving checkpoint 'second' to .* failed, and the script ended without waiting for it: .*No space left on device"
    r".*newest complete one is .*/first\b"
)
ENDS = {
    "by itself": ("", 120),
    "with status 0": ("sys.exit(0)", 120),
    "after destroying the engine": ("engine.destroy(); del engine", 120),
    "with its own exception": ("raise ValueError('on purpose')", 1),
    "with its own status": ("sys.exit('on purpose')", 120),
    "interrupted": ("raise KeyboardInterrupt", (1, -signal.SIGINT)),  # torch's hook for exceptions makes it the first
    "without standard streams": ("sys.stdout = None", 120),
}
SLOWLY = """
save.write_tensor_file = lambda path, entries, **options: (time.sleep(0.3), original(path, entries, **options))[1]
try:
    engine.wait_for_checkpoint()
except hf_zero.errors.CheckpointError:
    pass
engine.save_checkpoint(folder, "third")
"""
HEARD = """
try:
    engine.wait_for_checkpoint()
except hf_zero.errors.CheckpointError as error:
    print("heard", flush=True)
"""
SIGNALLED = """
import os, signal, sys, threading, time, torch, hf_zero
from hf_zero.system import signals
model = torch.nn.Linear(4, 4)
config = {"train_batch_size": 1, "checkpoint": {"writer": {"decoupled": True}}, "hf_zero": {"preemption_save_dir": sys.argv[1]}}
engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
engine.save_checkpoint(sys.argv[1])

def send():
    os.kill(os.getpid(), signal.SIGTERM)
    while not signals.heard():
        time.sleep(0.01)
    APART
    os.kill(os.getpid(), signal.SIGTERM)
    sent.set()

sent = threading.Event()
threading.Thread(target=send, daemon=True).start()
sent.wait()  # a step that lasts
while True:
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
"""
CHILDREN = """
import multiprocessing, sys, time
from hf_zero.system import exit_status

def train(end):
    exit_status.promise(lambda wait: f"lost {wait}")
    if end == "raises":
        raise ValueError("on purpose")
    if end == "exits":
        sys.exit(5)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork" if sys.argv[0] == "-c" else sys.argv[1])
    statuses = []
    for end in ("returns", "raises", "exits"):
        child = context.Process(target=train, args=(end,))
        child.start()
        child.join(600)
        statuses.append(child.exitcode)
    print(statuses)
"""


IMPORTS = "import torch._dynamo, hf_zero.checkpoint.save; hf_zero.initialize"
FAST = ("by itself", "with its own exception")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Ends of the script, by their names."""
    codes = {name: SCRIPT + ENDS[name][0] for name in FAST}
    codes |= {"heard": SCRIPT + HEARD, "slowly": SCRIPT + SLOWLY, "children": CHILDREN}
    # The same signal, which a launcher passes on, may take long on a busy machine.
    for name, apart in {"signalled": "signals.REPEATED_SECONDS = 600.0", "signalled again": "time.sleep(1.3)"}.items():
        codes[name] = SIGNALLED.replace("APART", apart)
    return run_forked(codes, tmp_path_factory.mktemp("ends"), IMPORTS)


def check_end(name: str, found: Ended) -> None:
    expected = ENDS[name][1]
    assert found.status in (expected if isinstance(expected, tuple) else (expected,)), (found.status, found.err)
    assert LOST.search(found.err), found.err
    assert (found.folder / "log").read_text() == "the last line", "files are closed as at any end"
    if "streams" not in name:
        assert found.out == "handler after\nhandler before\n", "exit handlers run as at any end"
    assert ("on purpose" in found.err) == ("own" in name)


@pytest.mark.parametrize("name", FAST)
def test_a_last_save_that_failed_is_told_by_the_exit_status(ended: dict[str, Ended], name: str) -> None:
    check_end(name, ended[name])


@pytest.mark.slow
def test_every_end_tells_of_a_last_save_that_failed(tmp_path: Path) -> None:
    for name, found in run_forked({name: SCRIPT + end for name, (end, _) in ENDS.items()}, tmp_path, IMPORTS).items():
        check_end(name, found)


def test_an_error_that_was_heard_is_not_told_again(ended: dict[str, Ended]) -> None:
    found = ended["heard"]
    assert (found.status, found.out) == (
        0,
        "heard\nhandler after\nhandler before\n",
    ) and "the script ended without waiting for it" not in found.err


def test_a_run_that_a_signal_ends_has_its_own_status(ended: dict[str, Ended]) -> None:
    """A launcher may pass a signal on that the process has had already."""
    found = ended["signalled"]
    assert found.status == 75 and (found.folder / "latest").read_text() == "global_step1", found
    assert "All ranks end with status 75" in found.err and "Traceback" not in found.err


def test_a_second_signal_ends_at_once_and_names_the_last_checkpoint(ended: dict[str, Ended]) -> None:
    found = ended["signalled again"]
    assert found.status == -signal.SIGTERM and (found.folder / "latest").read_text() == "global_step0", found
    assert re.search(r"SIGTERM for the second time, .*the newest complete one is .*/global_step0$", found.err, re.MULTILINE)


def test_the_interpreter_waits_for_the_last_checkpoint(ended: dict[str, Ended]) -> None:
    found = ended["slowly"]
    assert (found.status, (found.folder / "latest").read_text()) == (0, "third") and (found.folder / "third" / "complete").exists()


def test_a_forked_child_of_multiprocessing_tells_too(ended: dict[str, Ended]) -> None:
    assert ended["children"].out == "[120, 1, 5]\n" and ended["children"].err.count("lost True") == 3, ended["children"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_child_of_multiprocessing_tells_too(tmp_path: Path, method: str) -> None:
    (tmp_path / "script.py").write_text(CHILDREN)
    command = [sys.executable, str(tmp_path / "script.py"), method]
    env = environment({"PYTHONPATH": str(REPO)})
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, cwd=tmp_path, check=True)
    assert done.stdout == "[120, 1, 5]\n", done.stdout + done.stderr
    assert done.stderr.count("lost True") == 3


@pytest.mark.slow
def test_a_save_that_is_interrupted_at_the_end_is_lost(tmp_path: Path) -> None:
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
    end = heard + SLOWLY.replace("sleep(0.3)", "sleep(60)") + 'print("ready", flush=True)\n'
    command = [sys.executable, "-c", SCRIPT + end, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=REPO)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(1.0)  # the interpreter waits for the thread now
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=600)[1]
    assert process.returncode == 120, (process.returncode, err)
    assert "saving checkpoint 'third'" in err and "the process ends before it is written" in err and "first" in err
