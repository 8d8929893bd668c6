"""Find the rank of a process that mpirun or srun started from their environment variables, without an MPI library.

``init_distributed`` uses this module, and so do the integrations of libraries that read RANK.
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
# Number of ports for jobs with a known ID, from the default port on; below the ephemeral ports of operating systems.
_PORTS = 2000
# Programs that start ranks and are not ranks themselves; srun may start one of them per node.
_LAUNCHERS = frozenset({"accelerate", "accelerate-launch", "deepspeed", "torchrun", "hf-zero"})
_LAUNCHER_MODULES = ("accelerate.commands", "torch.distributed.run", "torch.distributed.launch", "hf_zero.cli")


@dataclass(frozen=True)
class Placement:
    """One process among those that a launcher started.

    Attributes:
        launcher: Name of the launcher, for messages.
        rank: Rank of the process among all processes.
        world: Number of all processes.
        local_rank: Rank of the process on this host.
        local_world: Number of processes on this host.
        address: Host of rank 0; "" if the launcher does not give it.
        job: ID of the job, which all its processes share and no other job has; "" if the launcher has none.
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
        """Return the port of rank 0, computed from the job ID so that two jobs on one host get different ports; else the default port."""
        return DEFAULT_PORT + (zlib.crc32(self.job.encode()) % _PORTS if self.job else 0)


def find_placement(environ: Mapping[str, str]) -> Placement | None:
    """Return the placement that Open MPI, MVAPICH2, MPICH (hydra, Intel MPI) or Slurm give this process; None if none of them started
    several processes.

    Raises:
        ConfigError: A variable is missing, or is not a number.
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
    """Return the address of the host that mpirun runs on; usually also rank 0's host, which rank 0 checks. "" if it is unknown."""
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
    """Return the placement of one task of a Slurm job step; the batch script and an interactive shell are no tasks."""
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
    """Return the number of tasks on node number ``node`` from Slurm's notation ``4(x2),3``; 0 if ``text`` does not cover the node."""
    for count, repeat in re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", text):
        node -= int(repeat or 1)
        if node < 0:
            return int(count)
    return 0


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm host list: ``gpu03`` for ``gpu[03-05,9],login``; "" for an empty list."""
    head = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?([^,\[]*)", nodes)
    if head is None:
        return ""
    prefix, numbers, suffix = head.groups()
    return prefix + (re.split("[-,]", numbers)[0] + suffix if numbers else suffix)


def export_placement(environ: MutableMapping[str, str] | None = None, port: int = DEFAULT_PORT) -> Placement | None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the variables of mpirun or srun.

    Nothing changes if RANK is set, or if this process is a launcher. Variables that are already set keep their values.

    Args:
        environ: The environment to read and to change; None is that of the process.
        port: Port of rank 0; the default value computes the port from the job ID.

    Returns:
        The placement, or None if nothing was changed.

    Raises:
        ConfigError: Variables of the launcher are wrong, or its address does not belong to the host of rank 0.
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
        raise ConfigError(
            f"{found.launcher} runs on {address}, but rank 0 runs on {here}: {_HOW_TO_SET_ADDRESS[found.launcher].format(here)}"
        )
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


_HOW_TO_SET_ADDRESS = {
    "Open MPI": "pass mpirun -x MASTER_ADDR={}",
    "MPICH's mpirun": "pass mpirun -genv MASTER_ADDR {}",
    "MVAPICH2": "pass mpirun -env MASTER_ADDR={}",
    "srun": "export MASTER_ADDR={} before srun",
}


def require_address(environ: Mapping[str, str]) -> None:
    """Raise if the ranks are on several hosts and MASTER_ADDR is not set, because each host would wait at its own address.

    Raises:
        ConfigError: mpirun or srun started ranks on several hosts, and the address of rank 0 is unknown.
    """
    found = find_placement(environ)
    if found is not None and found.local_world != found.world and "MASTER_ADDR" not in environ:
        how = _HOW_TO_SET_ADDRESS[found.launcher].format("HOST_OF_RANK_0")
        raise ConfigError(
            f"{found.launcher} started {found.world} ranks on several hosts, but does not give the address of rank 0: {how}, "
            "or start with hf-zero launch --hostfile"
        )


def _is_launcher(words: list[str]) -> bool:
    """Return whether the process with this command line is a launcher, which needs no rank and must not pass one to its children."""
    for number, word in enumerate(words[1:], start=1):
        if word == "-m":
            return words[number + 1 : number + 2] != [] and words[number + 1].startswith(_LAUNCHER_MODULES)
        if not word.startswith("-"):
            return os.path.basename(word) in _LAUNCHERS
    return False


def _is_here(address: str) -> bool:
    """Return whether ``address`` belongs to this host."""
    from hf_zero.launch.agent import is_here  # imported here: few programs need it

    return is_here(address)
