"""Nodes over ssh: the agent of a host, what ssh says, and one launch on two hosts behind a program that stands for ssh."""

from __future__ import annotations

import json
import os
import queue
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hf_zero import __version__
from hf_zero.errors import ConfigError
from hf_zero.launch import agent, nodes, ssh
from hf_zero.launch.agent import MARK, Output
from tests.support.processes import MOST_SECONDS, REPO, environment


def shown(output: Output, *pieces: str) -> list[str]:
    """Texts of the lines that come of pieces of output, each read a second after the one before; and of its end."""
    framed = b"".join(output.lines(piece.encode(), float(second)) for second, piece in enumerate(pieces)) + output.end()
    return [line.partition(b" ")[2].partition(b" ")[2].decode().split(" ", 1)[1] for line in framed.splitlines()]


def test_lines_are_whole() -> None:
    framed = Output(2, "3").lines(b"one\ntw", 0.0)
    assert framed == MARK + b"2 3 one\n"
    assert shown(Output(1, "0"), "one\ntw", "o\n", "\n", "thr", "ee") == ["one", "two", "", "three"]
    assert shown(Output(1, "0"), "windows\r\n", "\n") == ["windows", ""]
    assert [len(text) for text in shown(Output(1, "0"), "x" * 70_000, "y")] == [70_000, 1]


def test_a_progress_bar_is_its_newest_text() -> None:
    assert shown(Output(2, "0"), "\r10 %", "\r20 %\r30 %", "\r40 %", "\r100 %\n", "done\n") == ["10 %", "30 %", "40 %", "100 %", "done"]
    assert shown(Output(2, "0"), "\r10 %", "\n") == ["10 %"]  # not once more
    output = Output(2, "0")
    framed = b"".join(output.lines(b"\r%d %%" % step, step / 1000) for step in range(2500))
    assert framed.count(b"\n") == 3 and b" 1000 %\n" in framed


def settings(place: Path, **changes: Any) -> dict[str, Any]:
    given = {
        "folder": str(place), "script": "train.py", "kind": "script", "python": sys.executable, "address": "127.0.0.1", "port": 0,
        "chosen": False, "checks": True, "node": 0,
    }  # fmt: skip
    return {**given, **changes}


def test_a_host_that_is_lost_after_its_check_is_a_finding() -> None:
    lost, good = Mock(host="lost", errors=["it went"]), Mock(host="good", errors=[])
    run = nodes._Run(Mock())
    run._connections = [lost, good]
    ready = {"problems": [], "versions": {}}
    for event in (("report", lost, ready), ("closed", lost, 255), ("report", good, ready)):
        run._events.put(event)
    with pytest.raises(ConfigError, match="(?s)1 of 2 hosts cannot start.*- lost: .*it went"):
        run._check()


def test_what_an_agent_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = environment({"PYTHONPATH": str(REPO)})
    (tmp_path / "train.py").touch()
    problems, versions = agent.find_problems(settings(tmp_path), env)
    assert not problems and versions["hf_zero"] == __version__ and versions["python"] == ".".join(map(str, sys.version_info[:2]))
    assert versions["torch"] and versions["module"] is True
    monkeypatch.setattr(agent, "probe", lambda python, module, env: {"module": not module} if python else {"error": "broken"})

    def found(**changes: Any) -> str:
        return "\n".join(agent.find_problems(settings(tmp_path, **changes), {"PATH": str(tmp_path)})[0])

    assert "the folder /none/there cannot be entered there: No such file" in found(folder="/none/there")
    assert "the script other.py does not exist there" in found(script="other.py")
    assert not found(script="other.py", checks=False)
    assert "the program train.py does not exist there, or cannot be run" in found(kind="program")
    assert "the module train is not found there" in found(kind="module", script="train")
    assert found(python="") == "broken"
    assert "the address of rank 0, none.invalid, is unknown there" in found(address="none.invalid")
    assert "rank 0 would run there, but 192.0.2.1 is not an address of that host" in found(address="192.0.2.1")
    assert not found(address="192.0.2.1", chosen=True)
    assert "127.0.0.1, the host of rank 0, is an address of that host itself" in found(node=1)
    assert not found(node=1, address="192.0.2.1") and not found(node=1, chosen=True)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        assert f"port {taken.getsockname()[1]}, where the ranks would meet, cannot be used" in found(port=taken.getsockname()[1])


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        (255, "root@a: Permission denied (publickey).", "it refuses this user or key"),
        (255, "No ED25519 host key is known for a\nHost key verification failed.", "its host key is unknown here"),
        (255, "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.", "its host key has changed"),
        (255, "ssh: connect to host a port 22: Connection timed out", "it does not answer (ssh: connect to host a port 22"),
        (255, "ssh: connect to host a port 22: Connection refused", "no ssh server answers at this port"),
        (255, "ssh: Could not resolve hostname a: Name or service not known", "its name is unknown here"),
        (255, "", "ssh failed"),
        (127, "sh: 1: exec: /x/python: not found", f"the interpreter {sys.executable} does not exist there"),
        (1, "Traceback\nKeyError: 'x'", "the agent ended with exit status 1 (KeyError: 'x')"),
    ],
)
def test_why_ssh_did_not_reach_a_host(status: int, said: str, reason: str) -> None:
    assert reason in ssh.explain("a", status, said.split("\n"))


def test_words_of_ssh() -> None:
    words = ssh.words_of_ssh(2222, ["-o", "ConnectTimeout=1"], {"PDSH_SSH_ARGS_APPEND": "-i 'a key'"})
    assert words[:7] == ["ssh", "-o", "ConnectTimeout=1", "-i", "a key", "-p", "2222"]  # of two values, ssh takes the first
    assert "BatchMode=yes" in words and "-p" not in ssh.words_of_ssh(0, [], {})
    line = ssh.agent_on("a", ["ssh"])
    assert line[:3] == ["ssh", "--", "a"] and line[3].startswith(f"exec {sys.executable} -I -S -u -c ")
    assert [ssh.seconds_to_stop(words) for words in ([], ["--shutdown-timeout=600"], ["--shutdown_timeout", "1"])] == [60, 630, 60]


# Stands for ssh: a host is a process with fewer variables, which runs what it is told by a shell.
STAND_IN = f"""#!{sys.executable}
import os, sys
host, command = sys.argv[sys.argv.index("--") + 1 :]
os.chdir("/")
print("Welcome to", host, end="", flush=True)  # without a line's end
os.execve("/bin/sh", ["sh", "-c", command], {{"HOST": host, "PATH": "/usr/bin:/bin"}})
"""
SECRETS = {"HF_TOKEN": "hf_S3CRETtoken", "FILE_TOKEN": "S3CRET \"file's", "NCCL_KEY": "S3CRET é;$(x)"}  # pragma: allowlist secret
SCRIPT = """
import argparse, json, os, subprocess, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--text")
parser.add_argument("--r")
options = parser.parse_args()
rank = int(os.environ["RANK"])
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # leaves the rank's group and session
lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK) and path.exists()]
told = {"rank": rank, "local": options.local_rank, "text": options.text + options.r, "host": os.environ["HOST"],
        "pids": [os.getpid(), child.pid],
        "secrets": {name: os.environ[name] for name in json.loads(Path("names").read_text())}, "cwd": os.getcwd(),
        "shown": any(b"S3CRET" in line for line in lines), "lines": len(lines), "own": os.environ.get("AWS_OWN"),
        "places": [name for name in os.environ if name in ("HF_ZERO_OUTPUTS", "HF_ZERO_REPORT")]}
for part in ("TOLD ", json.dumps(told)):
    print(part, end="")
    sys.stdout.flush()
print(flush=True)
print("to errors", file=sys.stderr)
Path(f"printed-{rank}").touch()
while not all(Path(f"printed-{other}").exists() for other in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
if rank == 1:
    from hf_zero.system.last_words import report_to_launcher
    report_to_launcher()
    raise ValueError("a broken sample")
time.sleep(1000)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descendants are found in /proc")
def test_one_command_starts_two_hosts(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=2\n")
    (tmp_path / "names").write_text(json.dumps(list(SECRETS)))
    (tmp_path / ".deepspeed_env").write_text(f"FILE_TOKEN={SECRETS['FILE_TOKEN']}\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--hostfile", "hosts", "--master_addr", "127.0.0.1", "--master_port", str(port), "train.py", "--text", "a 'b' $c", "--r", "16"]
    env = environment({"PYTHONPATH": str(REPO), "HOME": str(tmp_path), "AWS_OWN": "1", **SECRETS, "PYTHONUNBUFFERED": "1"})
    env.pop("FILE_TOKEN")
    env["PATH"] = os.pathsep.join((str(program.parent), env["PATH"]))
    launch = [sys.executable, "-m", "hf_zero", "launch", *words]
    done = subprocess.run(launch, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=MOST_SECONDS, stdin=subprocess.DEVNULL)
    assert done.returncode == 1, done.stderr
    told = {}
    for line in done.stdout.splitlines():
        if "TOLD" in line:
            head, _, text = line.partition("] TOLD ")
            found = json.loads(text)
            assert head == f"[{found['host']} rank {found['rank']}"
            told[found["rank"]] = found
    assert [(told[rank]["host"], told[rank]["local"]) for rank in range(3)] == [("node-a", 0), ("node-b", 0), ("node-b", 1)]
    for found in told.values():
        assert found["secrets"] == SECRETS and not found["shown"] and found["lines"] > 6 and found["own"] is None
        assert (found["text"], found["cwd"], found["places"]) == ("a 'b' $c16", str(tmp_path), [])
        assert not any(map(alive, found["pids"])), "a process of a rank, or a child of it, is left"
    assert "[node-a] Welcome to node-a" in done.stdout.splitlines()
    errors = done.stderr.splitlines()
    assert [line for line in errors if "to errors" in line and "rank 0" in line] == ["[node-a rank 0] to errors"]
    assert "S3CRET" not in done.stderr
    first = next(number for number, line in enumerate(errors) if line.startswith("[hf_zero]"))
    assert errors[first] == "[hf_zero] rank 1 on node-b ended first, with exit status 1:" and errors[-1] == "ValueError: a broken sample"
    assert sum(line.startswith("[hf_zero]") for line in errors) == 1


@pytest.mark.parametrize("last", ['! {"end": 0, "fai', "1", "! [1"])
def test_a_connection_that_ends_inside_a_line(last: str, tmp_path: Path) -> None:
    (tmp_path / "said").write_bytes(MARK + b'! {"versions": {}, "problems": []}\n' + MARK + last.encode())
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    node = nodes.Node("a", [], 0, 1, {})
    nodes._Connection(node, ["cat", str(tmp_path / "said")], {}, events, nodes._Screen(events))
    assert [events.get(timeout=MOST_SECONDS)[0] for _ in range(2)] == ["report", "closed"] and events.empty()


def test_the_cause_is_the_first_failure_that_follows_from_no_other() -> None:
    def cause(*failures: tuple[str, str, bool]) -> str:
        job = nodes.Job([], [], {}, "train.py", "script", "a", 1, False, True, False, 60.0)
        run = nodes._Run(job)
        run._failures = [nodes._Failure(host, 1, {"kind": kind} if kind else None, late) for host, kind, late in failures]
        return run._cause().host

    assert cause(("a", "follows", False), ("b", "other", False)) == "b"
    assert cause(("a", "follows", False), ("b", "", False)) == "b", "a rank that was killed left no report"
    assert cause(("a", "follows", False), ("b", "interrupted", True), ("c", "other", True)) == "c"
    assert cause(("a", "follows", False), ("b", "interrupted", True), ("c", "", True)) == "a"
    assert cause(("a", "", False), ("b", "other", True)) == "a"
