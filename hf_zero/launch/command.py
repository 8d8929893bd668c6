"""`hf-zero launch`: the flags of DeepSpeed's launcher as one torchrun, mpirun or srun command, which takes this process' place."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hf_zero.errors import ConfigError
from hf_zero.launch import hosts as host_lists
from hf_zero.launch import local_rank
from hf_zero.launch.hosts import Host
from hf_zero.launch.parent import VARIABLE
from hf_zero.launch.placement import DEFAULT_PORT
from hf_zero.system.text_file import read_text_file

# Variables that ranks on other hosts get, by the beginnings of their names.
PREFIXES = ("ACCELERATE_", "CUDA_DEVICE", "GLOO_", "HF_", "MKL_", "NCCL_", "OMP_", "PYTHON", "TORCH_", "UCX_", "WANDB_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def names_passed_on(environ: Mapping[str, str]) -> list[str]:
    """Return names of the user's own variables that other hosts get, in the order of ``environ``."""
    return [name for name in environ if name.startswith(PREFIXES) and _NAME.fullmatch(name)]


def read_environment_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``.deepspeed_env`` in the home folder and in the current folder, which wins; accelerate writes the variables
    to pass on there.

    Raises:
        ConfigError: A file cannot be read or a line is no NAME=VALUE; names file and line, and shows nothing of its content.
    """
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    values: dict[str, str] = {}
    for path in dict.fromkeys((Path(os.path.expanduser("~"), name), Path(name))):
        if path.is_file():
            values.update(_read(path))
    return values


def _read(path: Path) -> dict[str, str]:
    values = {}
    for number, line in enumerate(read_text_file(path, "file of variables").split("\n"), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        key, found, value = content.partition("=")
        if not found or not _NAME.fullmatch(key.strip()) or "\0" in value:
            raise ConfigError(f"{path}:{number}: the line is no variable; expected NAME=VALUE, the name of letters, digits and _")
        values[key.strip()] = value.strip()
    return values


_DEFAULT_HOSTFILE = "/job/hostfile"
_LOCAL = "localhost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of DeepSpeed's launcher, and ``--dry-run``."""
    add = parser.add_argument
    add("-H", "--hostfile", help=f"lines like 'worker-1 slots=4' (default {_DEFAULT_HOSTFILE} where there is one; else this machine alone)")
    add("-i", "--include", default="", help="hosts and slots to use: worker-0@worker-1:0,2")
    add("-e", "--exclude", default="", help="hosts and slots to leave out; not together with --include")
    add("--num_nodes", type=_count, default=0, help="use the first N hosts")
    add("--num_gpus", "--num_accelerators", type=_slots, default=0, help="ranks per host (default: its slots, or this machine's devices)")
    add("--master_addr", default="", help="host of rank 0 (default: the first one)")
    add("--master_port", type=_count, default=DEFAULT_PORT, help=f"port of rank 0 (default {DEFAULT_PORT})")
    add(
        "--launcher",
        type=str.lower,
        default="standard",
        choices=sorted(_COMMANDS),
        help="who starts the ranks (default: standard, torchrun)",
    )
    add("--launcher_args", default="", help="further arguments of mpirun, srun or torchrun, as one text")
    add("--node_rank", type=int, default=-1, help="standard: number of this host, when its name is not in the hostfile")
    add("--module", action="store_true", help="the script is a module, run as python -m")
    add("--no_python", action="store_true", help="the script is a program, run without python")
    add("--no_local_rank", action="store_true", help="standard: no --local_rank for a script whose text declares that argument")
    for flag in ("--no_ssh", "--force_multi"):
        add(flag, action="store_true", help=argparse.SUPPRESS)  # accepted: what they ask for is how it works here
    add("--dry-run", "--dry_run", action="store_true", help="print the command, do not run it")
    add("script", help="training script, module or program")
    add("script_args", nargs=argparse.REMAINDER, help="its arguments")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return number


def _slots(text: str) -> int:
    number = _count(text)
    if number > host_lists.MOST_SLOTS:
        raise argparse.ArgumentTypeError(f"{text} is above {host_lists.MOST_SLOTS} ranks on one host")
    return number


@dataclass(frozen=True)
class Command:
    """Command that runs on this machine.

    Attributes:
        words: The command line, which any user of the host can read: no value of a variable is in it.
        variables: Where the ranks meet and their devices, added to its environment.
        from_files: Variables of ``.deepspeed_env``, added as well, before those; their values are never shown.
    """

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    from_files: dict[str, str] = field(default_factory=dict)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return all variables of the process, from those of this one."""
        return {**environ, **self.from_files, **self.variables}

    def __str__(self) -> str:
        """Return a line for a shell, and the names of the variables that it must not show."""
        line = shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), *self.words])
        hidden = [name for name in self.from_files if name not in self.variables]
        return f"{line}\n# with these variables of .deepspeed_env: {', '.join(hidden)}" if hidden else line


def launch(options: argparse.Namespace) -> int:
    """Prints the command, or becomes it: signals and the exit code are the launcher's own.

    Raises:
        ConfigError: Hosts or flags do not fit together, or the program that starts ranks is not there.
    """
    command = build_command(options, os.environ)
    if options.dry_run:
        print(command)
        return 0
    program = shutil.which(command.words[0])
    if program is None:
        raise ConfigError(
            f"--launcher {options.launcher} needs {command.words[0]}, which is not on PATH; install it, or use another launcher"
        )
    sys.stdout.flush()
    # What the user asked to run, without a shell.
    environment = {**command.environment(os.environ), VARIABLE: str(os.getpid())}  # the number stays
    os.execve(program, command.words, environment)  # nosec B606
    return 0  # never reached


def build_command(options: argparse.Namespace, environ: Mapping[str, str]) -> Command:
    """Return the command of ``options``.

    Raises:
        ConfigError: Hosts or flags do not fit together; names the flag, or the line of the hostfile.
    """
    if options.module and options.no_python:
        raise ConfigError("--module and --no_python exclude each other: a module needs python to run it")
    if options.include and options.exclude:
        raise host_lists.both_filters()
    return _COMMANDS[options.launcher](options, find_hosts(options), environ)


def find_hosts(options: argparse.Namespace) -> list[Host]:
    """Return the hosts of the job, filtered; this machine alone is called localhost."""
    path = options.hostfile or (_DEFAULT_HOSTFILE if Path(_DEFAULT_HOSTFILE).is_file() else "")
    if path:
        hosts = host_lists.read_hostfile(path)
        slots = options.num_gpus
    elif options.launcher == "slurm" and options.num_nodes:
        return []  # Slurm knows its hosts
    else:
        if options.num_nodes > 1:
            raise ConfigError(f"--num_nodes is {options.num_nodes}, but there is no hostfile; give one with --hostfile")
        hosts = [Host(_LOCAL, tuple(range(options.num_gpus or _devices())))]
        slots = 0
    if options.include:
        hosts = host_lists.include(hosts, options.include)
    if options.exclude:
        hosts = host_lists.exclude(hosts, options.exclude)
        if not hosts:
            raise ConfigError(f"--exclude {options.exclude} leaves no host")
    return host_lists.limit(hosts, options.num_nodes, slots)


def _devices() -> int:
    import torch  # only here: asking for the devices is all that needs it

    return max(1, torch.accelerator.device_count()) if torch.accelerator.is_available() else 1


def _further(options: argparse.Namespace) -> list[str]:
    try:
        return shlex.split(options.launcher_args)
    except ValueError as error:
        raise ConfigError(f"--launcher_args {options.launcher_args!r} cannot be split into words: {error}") from error


def _script(options: argparse.Namespace) -> list[str]:
    head = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
    return [*head, options.script, *options.script_args]


# -- one function per launcher ------------------------------------------------------------------------------------------


def _standard(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> Command:
    """Return the torchrun command for this host; with several hosts the same command is given on each."""
    number = _own_number(options, hosts) if len(hosts) > 1 else 0
    host = hosts[number]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(len(host.slots))]
    words += ["--nnodes", str(len(hosts)), "--node_rank", str(number)]
    words += ["--master_addr", options.master_addr or (hosts[0].name if len(hosts) > 1 else "127.0.0.1")]
    words += ["--master_port", str(options.master_port), *_further(options)]
    if local_rank.is_wanted(options):
        words += ["--no_python", sys.executable, "-m", local_rank.__name__]
    words += [*(["--module"] if options.module else []), *(["--no_python"] if options.no_python else []), options.script]
    return Command([*words, *options.script_args], _visible(host))


def _own_number(options: argparse.Namespace, hosts: list[Host]) -> int:
    if options.node_rank >= len(hosts):
        raise ConfigError(f"--node_rank is {options.node_rank}, but there are {len(hosts)} hosts, numbered from 0")
    if options.node_rank >= 0:
        return int(options.node_rank)
    own = platform.node()
    for number, host in enumerate(hosts):
        if host.name in (own, own.partition(".")[0]):
            return number
    raise ConfigError(
        f"this machine, {own}, is none of {', '.join(host.name for host in hosts)}: torchrun is started on every host, so give each "
        "its --node_rank, or let --launcher openmpi, mpich or slurm start all ranks from one"
    )


def _visible(host: Host) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))} if host.chosen else {}


def _open_mpi(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> Command:
    variables, from_files = _for_all(options, hosts, environ)
    words = [_program("mpirun.openmpi", "mpirun"), "-n", str(sum(len(host.slots) for host in hosts))]
    words += ["--host", ",".join(f"{host.name}:{len(host.slots)}" for host in hosts)]
    own = [] if _is_local(hosts) else names_passed_on(environ)
    for name in dict.fromkeys([*own, *from_files, *variables]):
        words += ["-x", name]  # the name alone: mpirun takes the value from its own environment
    return Command([*words, *_further(options), *_script(options)], variables, from_files)


def _mpich(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> Command:
    words = [_program("mpirun.mpich", "mpiexec.hydra", "mpirun"), "-n", str(sum(len(host.slots) for host in hosts))]
    words += ["-hosts", ",".join(f"{host.name}:{len(host.slots)}" for host in hosts)]
    # What it does by default, said aloud. A list of names would keep PATH and LD_LIBRARY_PATH from ranks on other hosts.
    words += ["-genvall"]
    return Command([*words, *_further(options), *_script(options)], *_for_all(options, hosts, environ))


def _slurm(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> Command:
    words = ["srun"]
    if hosts and hosts[0].name != _LOCAL:
        per_host = {len(host.slots) for host in hosts}
        if len(per_host) > 1:
            raise ConfigError(
                f"--launcher slurm: hosts with {sorted(per_host)} slots; srun starts equally many ranks on each, use --num_gpus"
            )
        words += ["--nodes", str(len(hosts)), "--nodelist", ",".join(host.name for host in hosts), "--ntasks-per-node", str(per_host.pop())]
    elif hosts:
        words += ["--ntasks", str(len(hosts[0].slots))]
    else:
        words += ["--nodes", str(options.num_nodes), *(["--ntasks-per-node", str(options.num_gpus)] if options.num_gpus else [])]
    variables = {"MASTER_ADDR": options.master_addr} if options.master_addr else {}
    if options.master_port != DEFAULT_PORT:
        variables["MASTER_PORT"] = str(options.master_port)
    variables.update(_same_devices(options, hosts))
    from_files = {} if _is_local(hosts) else read_environment_files(environ)
    # All of srun's own environment, without further variables: the option is a list, which a comma in a value would end.
    return Command([*words, "--export=ALL", *_further(options), *_script(options)], variables, from_files)


def _is_local(hosts: list[Host]) -> bool:
    """Return whether all ranks run here; with an empty list Slurm chooses the hosts."""
    return bool(hosts) and all(host.name == _LOCAL for host in hosts)


def _for_all(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that every rank gets: address of rank 0 and the chosen devices; and those that other hosts also get from
    ``.deepspeed_env``.
    """
    local = _is_local(hosts)
    address = options.master_addr or ("127.0.0.1" if local else hosts[0].name)
    variables = {"MASTER_ADDR": address, "MASTER_PORT": str(options.master_port), **_same_devices(options, hosts)}
    return variables, {} if local else read_environment_files(environ)


def _same_devices(options: argparse.Namespace, hosts: list[Host]) -> dict[str, str]:
    visible = [_visible(host) for host in hosts]
    if any(entry != visible[0] for entry in visible):
        raise ConfigError(
            f"--launcher {options.launcher}: {' and '.join(host.name for host in hosts)} use different devices, but this "
            "launcher sets the same CUDA_VISIBLE_DEVICES on all hosts. Choose the same slots on each"
        )
    return visible[0] if visible else {}


def _program(*names: str) -> str:
    """Return the first of ``names`` that is installed, else the last, for the message that it is missing."""
    return next((name for name in names if shutil.which(name)), names[-1])


def _pdsh(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> Command:
    """Return the command for DeepSpeed's default over ssh; on one host DeepSpeed does not use ssh either."""
    if len(hosts) == 1:
        return _standard(options, hosts, environ)
    commands = []
    for number, host in enumerate(hosts):
        own = argparse.Namespace(**{**vars(options), "node_rank": number})
        commands.append(f"- {host.name}: {_standard(own, hosts, environ)}")
    raise ConfigError(
        f"--launcher {options.launcher} would start ranks over ssh, which hf_zero does not: use openmpi, mpich, mvapich or slurm, or give "
        "the command of each host there, in the same folder:\n" + "\n".join(commands)
    )


_COMMANDS: dict[str, Callable[[argparse.Namespace, list[Host], Mapping[str, str]], Command]] = {
    "standard": _standard,
    "openmpi": _open_mpi,
    "mpich": _mpich,
    "mvapich": _mpich,  # its mpirun is hydra too
    "slurm": _slurm,
    "pdsh": _pdsh,
}
