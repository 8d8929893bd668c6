"""A real Slurm on this machine: a controller and several nodes, each a network namespace with a name and an address of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.collectives.slow_network import LINK, Namespaces, slow_network, why_not
from tests.support.processes import REPO, environment, until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
HEAD = "head"  # the controller's machine, on which jobs are submitted; it runs none
# States in which a job stays; SIGNALING and others pass.
ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "BOOT_FAIL"}
GPUS = 2  # of a node; files stand for the devices, and ranks do not see them

SETTINGS = """
ClusterName=test
SlurmctldHost={head}({address})
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SlurmdTimeout=30
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return the reason why this machine cannot have the cluster; "" when it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"{', '.join(absent)} not found (Debian: slurmctld, slurmd, slurm-client)"
    return why_not()


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


@dataclass
class Cluster:
    """A running cluster.

    Attributes:
        folder: Folder of Slurm's own files.
        work: Folder in which jobs are submitted and run; all nodes share it.
        network: Namespaces of the controller and of the nodes, in this order.
        nodes: Names of the nodes.
    """

    folder: Path
    work: Path
    network: Namespaces
    nodes: list[str]

    def variables(self) -> dict[str, str]:
        """Return the environment of a user's shell on the cluster."""
        link = {"GLOO_SOCKET_IFNAME": LINK, "PYTHONPATH": str(REPO), "SLURM_CONF": str(self.folder / "slurm.conf")}
        found = environment(link)
        return {**found, "PATH": os.pathsep.join((found["PATH"], "/usr/sbin", "/sbin"))}

    def on(self, number: int, words: list[str]) -> list[str]:
        """Return the command that runs ``words`` on a machine, under its name, with a hosts file that knows all machines.

        ``ip netns exec`` hides the control groups, which the daemon of a node looks for.
        """
        named = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        name = [HEAD, *self.nodes][number]
        entered = ["nsenter", f"--net=/run/netns/{self.network.names[number]}", "unshare", "--mount", "--uts"]
        return [*entered, "sh", "-c", named, str(self.folder / "hosts"), name, *words]

    def run(self, *words: str) -> str:
        """Run a command of Slurm on the controller's machine, and return its output."""
        done = subprocess.run(self.on(0, list(words)), cwd=self.work, env=self.variables(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def submit(self, *words: str) -> str:
        """Submit a job with ``sbatch``, and return its number."""
        return self.run("sbatch", "--parsable", *words).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm says of a job: JobState, Restarts, NodeList, ExitCode and others."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", number)))

    def ended(self, number: str) -> bool:
        """Return whether a job, or every job of an array, has ended."""
        states = re.findall(r"JobState=(\w+)", self.run("scontrol", "show", "job", number))
        return set(states) <= ENDS

    def lose(self, node: str) -> None:
        """Kill every process of a node at once, like a machine that loses power."""
        number = self.nodes.index(node) + 1
        self.network.cut(number)
        kill_all(self.network.names[number])


def kill_all(namespace: str) -> None:
    """Kill every process in a namespace that this cluster has made."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
    for process in map(int, found):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 3) -> Iterator[Cluster]:
    """Start the controller and the daemons of ``nodes`` nodes, and kill all that runs on them at the end.

    Raises:
        RuntimeError: No network namespaces can be made here.
    """
    names = [f"node-{number}" for number in range(1, nodes + 1)]
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(slow_network(nodes + 1, "hfzq"))
        made = Cluster(folder / "slurm", folder / "work", network, names)
        _write_settings(made)
        stack.callback(lambda: [kill_all(namespace) for namespace in network.names])
        _start(made, 0, ["slurmctld", "-D"])
        until(lambda: _answers(made), "the controller of Slurm", pause=0.2)
        for number, name in enumerate(names, start=1):
            _start(made, number, ["slurmd", "-D", "-N", name])
        until(lambda: made.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(nodes), "idle nodes of Slurm", pause=0.2)
        yield made


def _write_settings(made: Cluster) -> None:
    for name in ("state", *made.nodes):
        (made.folder / name).mkdir(parents=True)
    made.work.mkdir()
    lines = (f"{made.network.address(number)} {name}\n" for number, name in enumerate([HEAD, *made.nodes]))
    (made.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
    (made.work / "examples").symlink_to(REPO / "examples")
    devices = [made.folder / f"gpu{number}" for number in range(GPUS)]
    for device in devices:
        device.touch()
    (made.folder / "gres.conf").write_text(f"Name=gpu File={made.folder}/gpu[0-{GPUS - 1}] Flags=no_gpu_env\n")
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={made.network.address(number)} CPUs=8 Gres=gpu:{GPUS}" for number, name in enumerate(made.nodes, start=1)
    )
    settings = SETTINGS.format(head=HEAD, address=made.network.address(0), folder=made.folder, nodes=nodes)
    (made.folder / "slurm.conf").write_text(settings)


def _start(made: Cluster, number: int, words: list[str]) -> None:
    with (made.folder / f"machine-{number}.out").open("wb") as out:
        subprocess.Popen(made.on(number, words), stdout=out, stderr=out, env=made.variables(), start_new_session=True)


def _answers(made: Cluster) -> bool:
    done = subprocess.run(made.on(0, ["scontrol", "ping"]), env=made.variables(), capture_output=True, text=True)
    return "is UP" in done.stdout
