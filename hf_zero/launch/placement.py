"""Rank of a process that mpirun or srun started, from the variables they set, without an MPI library.

Read by ``init_distributed``, and where a library makes the state that looks at RANK.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hf_zero.errors import ConfigError

DEFAULT_PORT = 29500
# Ports of jobs with a known number: from the default on, below what systems give out by themselves.
_PORTS = 2000
# Programs that start ranks and are none themselves: srun may start one of them per node.
_LAUNCHERS = frozenset({"accelerate", "accelerate-launch", "deepspeed", "torchrun", "hf-zero"})
_LAUNCHER_MODULES = ("accelerate.commands", "torch.distributed.run", "torch.distributed.launch", "hf_zero.cli")


@dataclass(frozen=True)
class Placement:
    """One process among those that a launcher started.

    Attributes:
        launcher: Who started it, for messages.
        rank: Its rank among all.
        world: Number of all.
        local_rank: Its rank on this host.
        local_world: Number of processes on this host.
        address: Host of rank 0; "" when the launcher does not tell.
        job: Something that all processes of the job share and other jobs do not; "" when the launcher has no such thing.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str = ""
    job: str = ""

    @property
    def port(self) -> int:
        """Return the port of rank 0: two jobs on one host get different ports if their numbers are known."""
        return DEFAULT_PORT + (zlib.crc32(self.job.encode()) % _PORTS if self.job else 0)


def find_placement(environ: Mapping[str, str]) -> Placement | None:
    """Return the placement that Open MPI, MVAPICH2, MPICH (hydra, Intel MPI) or Slurm give this process; None when none of them started
    several.

    Raises:
        ConfigError: A variable holds no number, or one is missing.
    """
    for size, read in _READERS.items():
        if size in environ:
            found = read(environ)
            if found is not None and found.world > 1:
                return found
    return None


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name)
    if text is None or not re.fullmatch("[0-9]{1,9}", text.strip()):
        raise ConfigError(
            f"this process was started by {launcher}, but the environment variable {name} is {text!r}; a number is expected. "
            "Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT yourself, or start with torchrun"
        )
    return int(text.strip())


def _open_mpi(environ: Mapping[str, str]) -> Placement:
    rank, world, local_rank, local_world = (
        _number(environ, f"OMPI_COMM_WORLD_{name}", "Open MPI") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    job = environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMIX_NAMESPACE") or ""
    return Placement("Open MPI", rank, world, local_rank, local_world, _mpirun_host(environ), job)


def _mpirun_host(environ: Mapping[str, str]) -> str:
    """Return the address of the host mpirun runs on, which is rank 0's unless the hosts were named otherwise; rank 0 checks it."""
    found = re.search(r";tcp://([0-9.]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return found.group(1) if found else ""


def _mvapich(environ: Mapping[str, str]) -> Placement:
    rank, world, local_rank, local_world = (
        _number(environ, f"MV2_COMM_WORLD_{name}", "MVAPICH2") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    return Placement("MVAPICH2", rank, world, local_rank, local_world)


def _hydra(environ: Mapping[str, str]) -> Placement | None:
    if "MPI_LOCALRANKID" not in environ:  # Slurm sets PMI_SIZE too
        return None
    rank, world, local_rank, local_world = (
        _number(environ, name, "MPICH's mpirun") for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    )
    return Placement("MPICH's mpirun", rank, world, local_rank, local_world)


def _slurm(environ: Mapping[str, str]) -> Placement:
    """Return the placement of one task of a job step; the batch script itself and an interactive shell have none."""
    rank, world, local_rank = (_number(environ, f"SLURM_{name}", "srun") for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
    node = _number(environ, "SLURM_NODEID", "srun") if "SLURM_NODEID" in environ else 0
    local_world = _tasks_of_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), node) or world
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return Placement("srun", rank, world, local_rank, local_world, first_host(environ.get("SLURM_STEP_NODELIST", "")), job)


_READERS = {
    "OMPI_COMM_WORLD_SIZE": _open_mpi,
    "MV2_COMM_WORLD_SIZE": _mvapich,
    "PMI_SIZE": _hydra,
    "SLURM_STEP_NUM_TASKS": _slurm,
}


def _tasks_of_node(text: str, node: int) -> int:
    """Return the number of tasks on node number ``node`` from Slurm's ``4(x2),3``; 0 when it is not given."""
    for count, repeat in re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", text):
        node -= int(repeat or 1)
        if node < 0:
            return int(count)
    return 0


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: ``gpu[03-05,9],login`` is ``gpu03``; "" of nothing."""
    head = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?([^,\[]*)", nodes)
    if head is None:
        return ""
    prefix, numbers, suffix = head.groups()
    return prefix + (re.split("[-,]", numbers)[0] + suffix if numbers else suffix)


def export_placement(environ: MutableMapping[str, str] | None = None, port: int = DEFAULT_PORT) -> Placement | None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the variables of mpirun or srun.

    A process that has a RANK, or that starts others, is left alone; so is every variable that is set already.

    Args:
        environ: The environment to read and to change, by default that of the process.
        port: Port of rank 0; the default lets the job's number choose.

    Returns:
        What was found, or None.

    Raises:
        ConfigError: Variables of the launcher are broken, or the address it gives is not one of rank 0's host.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ or _is_launcher(sys.orig_argv):
        return None
    found = find_placement(environ)
    if found is None:
        return None
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if found.local_world == found.world else found.address)
    if found.rank == 0 and address and address == found.address and "MASTER_ADDR" not in environ and not _is_here(address):
        here = os.uname().nodename
        raise ConfigError(f"{found.launcher} runs on {address}, but rank 0 on {here}: {_NAME_IT[found.launcher].format(here)}")
    values = {
        "RANK": found.rank,
        "WORLD_SIZE": found.world,
        "LOCAL_RANK": found.local_rank,
        "LOCAL_WORLD_SIZE": found.local_world,
        "MASTER_PORT": found.port if port == DEFAULT_PORT else port,
    }
    for name, value in values.items():
        environ.setdefault(name, str(value))
    if address:
        environ.setdefault("MASTER_ADDR", address)
    return found


_NAME_IT = {
    "Open MPI": "pass mpirun -x MASTER_ADDR={}",
    "MPICH's mpirun": "pass mpirun -genv MASTER_ADDR {}",
    "MVAPICH2": "pass mpirun -env MASTER_ADDR={}",
    "srun": "export MASTER_ADDR={} before srun",
}


def require_address(environ: Mapping[str, str]) -> None:
    """Refuses to meet at this host's own address when the ranks are on several hosts.

    Raises:
        ConfigError: mpirun started ranks on several hosts and nobody said where rank 0 is.
    """
    found = find_placement(environ)
    if found is not None and found.local_world != found.world and "MASTER_ADDR" not in environ:
        how = _NAME_IT[found.launcher].format("HOST_OF_RANK_0")
        raise ConfigError(
            f"{found.launcher} started {found.world} ranks on several hosts, but does not give the address of rank 0: {how}, "
            "or start with hf-zero launch --hostfile"
        )


def _is_launcher(words: list[str]) -> bool:
    """Return whether the process with this command line only starts others: it needs no rank, and must not hand one down."""
    for number, word in enumerate(words[1:], start=1):
        if word == "-m":
            return words[number + 1 : number + 2] != [] and words[number + 1].startswith(_LAUNCHER_MODULES)
        if not word.startswith("-"):
            return os.path.basename(word) in _LAUNCHERS
    return False


def _is_here(address: str) -> bool:
    """Return whether ``address`` is one of this host's."""
    import socket  # only here: nearly no program needs it

    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
