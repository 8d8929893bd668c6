"""Launchers of replica groups, one process each, that fork their ranks from a process that has imported everything.

    python -m tests.replica_groups.agents FOLDER      # with FOLDER/plan.json, see ``group_run``

A launcher (agent) ends all ranks of its group when one has died, and starts them again, like torchrun; with ``torchrun`` in the plan it is
torchrun, whose ranks import everything anew. This process starts an agent again
that was killed. With ``nodes`` in the plan it puts each group into a network namespace, cuts its link and kills all its processes when a
rank asks for it: the other groups are not told. The lighthouse is torchft's, in a process of its own. This process ends with status 0 when
all groups have trained.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.collectives.slow_network import LINK, Namespaces, slow_network
from tests.replica_groups.group_run import train, went_on_without
from tests.support.processes import until

_LIGHTHOUSE = """
import sys, time
from torchft._torchft import LighthouseServer
address, times = f"0.0.0.0:{sys.argv[1]}", {"join_timeout_ms": 60000, "quorum_tick_ms": 20}
times["heartbeat_timeout_ms"] = int(sys.argv[2])
server = LighthouseServer(bind=address, min_replicas=1, **times)
print(f"port {server.address().rpartition(':')[2]}", flush=True)
time.sleep(1 << 20)
"""
_PORT = 29510
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def free_port() -> int:
    """Return a port of this machine that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Agent:
    """The launcher of one group; runs in a process of its own."""

    def __init__(self, plan: dict[str, Any], folder: Path, group: int, lighthouse: str, network: Namespaces | None) -> None:
        self._plan, self._folder, self._group = plan, folder, group
        self._variables = {"REPLICA_GROUP_ID": str(group), "NUM_REPLICA_GROUPS": str(plan["groups"]), "TORCHFT_LIGHTHOUSE": lighthouse}
        self._variables |= {"TORCHFT_TIMEOUT_SEC": str(plan.get("timeout", 60)), "MASTER_ADDR": "127.0.0.1"}
        self._network = network

    def run(self) -> int:
        """Start the ranks until all have ended well; return 0 then."""
        if self._network is not None:
            library = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{self._network.names[self._group]}") as name:
                if library.setns(name.fileno(), _NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), "setns")
            os.environ["GLOO_SOCKET_IFNAME"] = LINK
        failures = 0
        while True:
            while self._is_to_wait():
                time.sleep(0.01)
            attempt = len(list(self._folder.glob(f"attempt-{self._group}-*")))
            (self._folder / f"attempt-{self._group}-{attempt}").write_text("")
            port = str(free_port())
            ranks = [self._start(rank, attempt, port) for rank in range(self._plan["ranks"])]
            status = self._status_of(ranks)
            if status == 0:
                return 0
            failures += status != -signal.SIGKILL
            if failures > self._plan.get("failures", 0):
                return 1

    def become_torchrun(self) -> None:
        """Start torchrun in place of this process; it starts the ranks."""
        log = os.open(self._folder / f"log-{self._group}-torchrun", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._plan["ranks"])]
        words += ["--max-restarts", "100", "--monitor-interval", "0.1", "-m", "tests.replica_groups.group_run", str(self._folder)]
        os.execve(words[0], words, {**os.environ, **self._variables, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    def _is_to_wait(self) -> bool:
        """Return whether the last death of this group says that another group takes a step without it first, and none has."""
        died = sorted(self._folder.glob(f"died-{self._group}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        death = json.loads(died[-1].read_text()) if died else {}
        return bool(death.get("lone")) and not went_on_without(self._folder, self._group, death["time"])

    def _start(self, rank: int, attempt: int, port: str) -> int:
        agent = os.getpid()
        child = os.fork()
        if child:
            return child
        world = str(self._plan["ranks"])
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world})
        os.environ.update(
            {**self._variables, "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": str(attempt), "HF_ZERO_LAUNCHER": str(agent)}
        )
        log = os.open(self._folder / f"log-{self._group}-{rank}-{attempt}", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        try:
            train(self._plan, self._folder)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _status_of(self, ranks: list[int]) -> int:
        """Wait for the ranks, and end all when one has failed; return its exit status, negative for a signal, or 0."""
        left = set(ranks)
        while left:
            child, status = os.wait()
            left.discard(child)
            if status:
                for other in left:
                    os.kill(other, signal.SIGKILL)
                for other in left:
                    os.waitpid(other, 0)
                return os.waitstatus_to_exitcode(status)
        return 0


@contextlib.contextmanager
def lighthouse(folder: Path, network: Namespaces | None, heartbeat: int) -> Iterator[str]:
    """Run torchft's lighthouse, and yield its address. A group without a sign of life for ``heartbeat`` ms is left out."""
    number = len(network.names) - 1 if network is not None else 0
    words = [sys.executable, "-c", _LIGHTHOUSE, str(_PORT if network is not None else 0), str(heartbeat)]
    host = network.address(number) if network is not None else "127.0.0.1"
    with (folder / "lighthouse").open("w") as log:
        server = subprocess.Popen(words if network is None else network.command(number, words), stdout=log, stderr=log)
    try:
        ports: list[str] = []  # a free one that is looked for here can be taken by the time the server asks for it
        until(lambda: ports.extend(re.findall(r"^port (\d+)$", (folder / "lighthouse").read_text(), re.MULTILINE)) or bool(ports))
        yield f"http://{host}:{ports[0]}"
    finally:
        server.kill()
        server.wait()


def run(plan: dict[str, Any], folder: Path) -> None:
    """Run all groups until they have trained, or ``limit`` seconds of the plan have passed.

    Raises:
        SystemExit: A group failed in another way than the plan says, or has not ended.
    """
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(slow_network(plan["groups"] + 1, "hfzr")) if plan.get("nodes") else None
        address = stack.enter_context(lighthouse(folder, network, plan.get("heartbeat", 1000)))
        agents: dict[int, int] = {}

        def end() -> None:
            for agent in agents.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent, signal.SIGKILL)

        stack.callback(end)

        def start(group: int) -> None:
            child = os.fork()
            if not child:
                status = 1
                try:
                    agent = Agent(plan, folder, group, address, network)
                    if plan.get("torchrun"):
                        agent.become_torchrun()
                    status = agent.run()
                except BaseException:
                    traceback.print_exc()
                os._exit(status)
            agents[group] = child

        for group in range(plan["groups"]):
            start(group)
        until = time.monotonic() + plan["limit"]
        while agents:
            if time.monotonic() > until:
                raise SystemExit(f"groups {sorted(agents)} have not ended")
            _look(plan, folder, agents, start, network)
            time.sleep(0.01)


def _look(plan: dict[str, Any], folder: Path, agents: dict[int, int], start: Any, network: Namespaces | None) -> None:
    """Start agents again that were killed, and nodes that have asked to lose their network and power."""
    for group, agent in list(agents.items()):
        cut = folder / f"cut-{group}"
        if network is not None and cut.exists():
            network.cut(group)
            found = subprocess.run(["ip", "netns", "pids", network.names[group]], capture_output=True, text=True, check=True)
            for word in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(word), signal.SIGKILL)
            os.waitpid(agent, 0)
            cut.unlink()
            network.mend(group)
            start(group)
            continue
        done, status = os.waitpid(agent, os.WNOHANG)
        if not done:
            continue
        if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
            start(group)
        elif status:
            raise SystemExit(f"the agent of group {group} failed")
        else:
            del agents[group]


def main() -> None:
    import torch

    import hf_zero.utils  # noqa: F401
    from hf_zero import initialize  # noqa: F401

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())
    if not plan.get("disk"):
        import torchft  # noqa: F401
    with contextlib.suppress(ImportError):  # torch's compiler and transformers import it later in each rank, which takes long
        import bitsandbytes  # noqa: F401
    if plan.get("how", "engine") != "engine":
        from accelerate import Accelerator  # noqa: F401
        from transformers import Trainer  # noqa: F401
    run(plan, folder)


if __name__ == "__main__":
    main()
