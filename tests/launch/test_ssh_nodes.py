"""`hf-zero launch --hostfile` over real ssh servers, each in a network namespace with a name: training, checks, and every kind of end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.collectives.slow_network import LINK
from hf_zero import __version__
from tests.launch.machines import Machines, machines
from tests.support.processes import MOST_SECONDS, REPO, environment, run, until

pytestmark = pytest.mark.slow

NAMES = ("node-1", "node-2")
SECRETS = {"HF_TOKEN": "hf_S3CRETtoken", "FILE_KEY": "S3CRET \"file's", "WANDB_API_KEY": "S3CRET wandb"}  # pragma: allowlist secret
TRAINING = """
import os, platform, sys, time, torch
import torch.distributed as dist
import hf_zero
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
engine = hf_zero.initialize(model=model, config=config)[0]
losses, rank = [], dist.get_rank()
while len(losses) < 3 or sys.argv[1] != "end":
    torch.manual_seed(10 * len(losses) + rank)
    loss = engine(torch.randn(4, 8)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    if len(losses) == 3:
        print("PID", os.getpid(), "LOSSES", *(value.hex() for value in losses), flush=True)
        print("HOST", platform.node(), os.environ.get("HF_TOKEN"), os.environ.get("FILE_KEY"), flush=True)
    if sys.argv[1] == "fail" and len(losses) == 10 and rank == 3:
        raise ValueError("a broken sample")
    if len(losses) > 3:
        time.sleep(0.01)
dist.destroy_process_group()
"""
# The launcher with shorter times, for tests that wait until they have passed.
IMPATIENT = """
import sys
from hf_zero import cli
from hf_zero.launch import nodes
nodes._ALIVE_SECONDS, nodes._SILENCE_SECONDS = 1.0, 15.0
sys.exit(cli.main(["launch", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(NAMES, "hfzh", tmp_path_factory.mktemp("keys")) as made:
        made.serve(0)
        made.serve(1)
        yield made


def variables(**changes: str) -> dict[str, str]:
    return environment({"GLOO_SOCKET_IFNAME": LINK, "PYTHONPATH": str(REPO), "DEEPSPEED_TIMEOUT": "1", **changes})


class Launch:
    """A launch on the first machine: its process, and what it has printed."""

    def __init__(self, where: Machines, folder: Path, *words: str, ssh: str = "", launcher: str = "-m hf_zero launch") -> None:
        (folder / "train.py").write_text(TRAINING)
        if not (folder / "hosts").exists():
            (folder / "hosts").write_text("".join(f"{name} slots=2\n" for name in NAMES))
        (folder / ".deepspeed_env").write_text(f"FILE_KEY={SECRETS['FILE_KEY']}\n")
        self._where, self._log = where, folder / "log"
        env = variables(**{name: value for name, value in SECRETS.items() if name != "FILE_KEY"}, HOME=str(folder))
        command = [sys.executable, *launcher.split(), "--hostfile", "hosts", "--ssh_args", f"{ssh} -F {where.config}", *words]
        self.process = where.run(0, command, self._log, env, folder)

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def lines(self, word: str) -> list[str]:
        """Lines of ranks that begin with ``word``, behind the host and the rank in front."""
        return sorted(line for line in self.text.splitlines() if f"] {word} " in line)

    def until_trained(self) -> None:
        until(lambda: len(self.lines("HOST")) == 4 or self.process.poll() is not None, "a step on both machines", pause=0.2)
        assert self.process.poll() is None, self.text

    def end(self) -> int:
        try:
            return self.process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs on\n{self.text[-3000:]}") from None

    def assert_nothing_is_left(self) -> None:
        for number, name in enumerate(NAMES):
            until(lambda number=number: not self._where.processes(number), f"the end of all processes of {name}", pause=0.1)


def local_losses(folder: Path) -> list[str]:
    (folder / "train.py").write_text(TRAINING)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", "train.py", "end"]
    printed = run([sys.executable, *words], cwd=folder, env=variables(GLOO_SOCKET_IFNAME="lo"), timeout=MOST_SECONDS)
    return sorted(line.partition("LOSSES ")[2] for line in printed.splitlines() if "LOSSES" in line)


@pytest.mark.parametrize("words", [(), ("--force_multi", "--launcher", "pdsh", "--ssh_port", "2222")], ids=["first host", "all over ssh"])
def test_training_on_two_machines_equals_a_local_one(two: Machines, tmp_path: Path, words: tuple[str, ...]) -> None:
    started = Launch(two, tmp_path, *words, "train.py", "end")
    assert started.end() == 0, started.text
    for rank, line in enumerate(started.lines("HOST")):
        name = NAMES[rank // 2]
        assert line == f"[{name} rank {rank}] HOST {name} {SECRETS['HF_TOKEN']} {SECRETS['FILE_KEY']}"
    assert sorted(line.partition("LOSSES ")[2] for line in started.lines("PID")) == local_losses(tmp_path)
    started.assert_nothing_is_left()


def test_no_secret_in_a_command_line(two: Machines, tmp_path: Path) -> None:
    started = Launch(two, tmp_path, "train.py", "on")
    started.until_trained()
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_bytes()
    assert b"train.py" in found and b"S3CRET" not in found
    assert len(two.processes(1)) >= 4, "agent, torchrun and two ranks"
    started.process.send_signal(signal.SIGINT)
    assert started.end() == 128 + signal.SIGINT, started.text
    text = started.text
    assert "[hf_zero] ended by SIGINT; no process is left on any of 2 hosts" in text
    # One line per host; ranks that lose their connection to the other host before the signal is there say so.
    assert 1 <= text.count(": interrupted in ") <= 2 and text.count(": interrupted in ") + text.count("for the first error") == 2, text
    started.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_survives_the_launcher(two: Machines, tmp_path: Path, number: int) -> None:
    started = Launch(two, tmp_path, "train.py", "on")
    started.until_trained()
    started.process.send_signal(number)
    assert started.end() == (128 + number if number == signal.SIGTERM else -number)
    started.assert_nothing_is_left()


def test_a_rank_that_raises_is_named_once(two: Machines, tmp_path: Path) -> None:
    started = Launch(two, tmp_path, "train.py", "fail")
    assert started.end() == 1
    lines = started.text.splitlines()
    assert [line for line in lines if line.startswith("[hf_zero]")] == ["[hf_zero] rank 3 on node-2 ended first, with exit status 1:"]
    assert lines[-1] == "ValueError: a broken sample"
    started.assert_nothing_is_left()


@pytest.mark.parametrize("victim", ["rank 2", "torchrun", "agent"])
def test_a_process_that_is_killed(two: Machines, tmp_path: Path, victim: str) -> None:
    started = Launch(two, tmp_path, "train.py", "on")
    started.until_trained()
    if victim == "rank 2":
        pid = int(started.lines("PID")[2].split("PID ")[1].split()[0])
    else:
        rank = int(started.lines("PID")[2].split("PID ")[1].split()[0])
        torchrun = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        pid = torchrun if victim == "torchrun" else int(Path(f"/proc/{torchrun}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    assert started.end() != 0
    last = [line for line in started.text.splitlines() if line.startswith("[hf_zero]")]
    expected = "the connection to node-2 was lost" if victim == "agent" else "node-2 ended first, with exit status"
    assert len(last) == 1 and expected in last[0], started.text[-3000:]
    started.assert_nothing_is_left()


@pytest.mark.parametrize("way", ["link down", "crash"])
def test_a_machine_that_is_lost(two: Machines, tmp_path: Path, way: str) -> None:
    (tmp_path / "launch.py").write_text(IMPATIENT)
    started = Launch(two, tmp_path, "train.py", "on", ssh="-o ServerAliveInterval=2 -o ServerAliveCountMax=3", launcher="launch.py")
    started.until_trained()
    two.network.cut(1)
    try:
        if way == "crash":
            two.crash(1)
        assert started.end() != 0
        assert "the connection to node-2 was lost" in started.text, started.text[-3000:]
        started.assert_nothing_is_left()  # on node-2, too, which hears nothing of its launcher
    finally:
        two.network.mend(1)
        if way == "crash":
            two.serve(1)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """One host is ready, and each of the others has a fault of its own; none starts."""
    names = ("ready", "wrong-key", "link-down", "no-server", "unknown-key", "changed-key", "old-version", "no-script", "no-python")
    keys = tmp_path / "keys"
    keys.mkdir()
    folder = tmp_path / "job"
    folder.mkdir()
    other = tmp_path / "other.py"
    other.write_text((REPO / "hf_zero" / "__init__.py").read_text().replace('__version__ = "', '__version__ = "9.'))
    before = {
        "old-version": f"mount --bind {other} {REPO / 'hf_zero' / '__init__.py'}",
        "no-script": f"mount -t tmpfs none {folder}",
        "no-python": f"mount -t tmpfs none {Path(sys.executable).parent}",
    }
    with machines(names, "hfzw", keys) as made:
        for number, name in enumerate(names):
            if name != "no-server":
                made.serve(number, before.get(name, "true"))
        made.network.cut(names.index("link-down"))
        (keys / "authorized_wrong-key").write_text("")
        known = (keys / "known_hosts").read_text().splitlines()
        foreign = (keys / "host_key_ready.pub").read_text().strip()
        known[names.index("changed-key")] = f"[changed-key]:2222 {foreign}"
        del known[names.index("unknown-key")]
        (keys / "known_hosts").write_text("\n".join(known) + "\n")
        (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
        config = made.config.read_text().replace("ConnectTimeout 20", "ConnectTimeout 5")
        made.config.write_text(config)
        started = Launch(made, folder, "train.py", "end")
        assert started.end() == 1
        told = dict(line[2:].split(": ", 1) for line in started.text.splitlines() if line.startswith("- "))
        assert "8 of 9 hosts cannot start, so none has started:" in started.text and set(told) == set(names[1:]), started.text
        expected = {
            "wrong-key": "refuses this user or key", "link-down": "does not answer", "no-server": "no ssh server answers",
            "unknown-key": "host key is unknown", "changed-key": "host key has changed", "old-version": "it has hf_zero 9.",
            "no-script": "the script train.py does not exist there", "no-python": f"the interpreter {sys.executable} does not exist there",
        }  # fmt: skip
        assert {name: text for name, text in expected.items() if text not in told[name]} == {}, json.dumps(told, indent=1)
        assert not any(made.processes(number) for number in range(len(names)))
        # Only connections are made then: versions may differ.
        (folder / "hosts").write_text("ready slots=1\nold-version slots=1\n")
        started = Launch(made, folder, "--no_ssh_check", "train.py", "end")
        assert started.end() != 0 and f"version of hf_zero is {__version__} on rank 0, 9." in started.text, started.text[-3000:]
