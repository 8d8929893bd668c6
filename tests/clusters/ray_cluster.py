"""A real cluster of Ray on this machine: a head and further nodes, each a raylet of its own with the CPUs of one worker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes import REPO, environment, until
from tests.support.ranks import _free_port


@dataclass
class RayCluster:
    """A running cluster.

    Attributes:
        folder: Folder of the logs.
        port: Port of the head.
        nodes: Launcher of each node, the head first; each leads a session of its own.
    """

    folder: Path
    port: int
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def variables(self) -> dict[str, str]:
        """Return the environment of a driver and of the nodes."""
        own = {"RAY_ADDRESS": f"127.0.0.1:{self.port}", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        return environment({**own, "PYTHONPATH": str(REPO), "RAY_TMPDIR": str(self.folder)})

    def start(self, *words: str) -> None:
        """Start a node with the CPU of one worker, and wait until it is up."""
        log = self.folder / f"node-{len(self.nodes)}.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--disable-usage-stats", "--block", *words]
        with log.open("wb") as out:
            node = subprocess.Popen(command, env=self.variables(), stdout=out, stderr=out, start_new_session=True)
        self.nodes.append(node)
        until(lambda: node.poll() is not None or b"Ray runtime started" in log.read_bytes(), f"node {len(self.nodes)} of Ray", pause=0.5)
        assert node.poll() is None, log.read_text()

    def join(self) -> None:
        """Start a further node."""
        self.start(f"--address=127.0.0.1:{self.port}")

    def lose(self, number: int) -> None:
        """Kill every process of a node at once, like a machine that loses power."""
        kill_tree(self.nodes[number].pid)


def kill_tree(number: int) -> None:
    """Kill a process that this cluster has started, with all that it has started."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        whole = psutil.Process(number)
        for process in [*whole.children(recursive=True), whole]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Start a head and one further node, and kill all nodes at the end."""
    made = RayCluster(folder, _free_port())
    try:
        made.start("--head", f"--port={made.port}", "--include-dashboard=false")
        made.join()
        yield made
    finally:
        for node in reversed(made.nodes):
            kill_tree(node.pid)
            node.wait()
