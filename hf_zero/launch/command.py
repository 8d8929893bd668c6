"""Implement `hf-zero launch`: turn the flags of DeepSpeed's launcher into one torchrun, mpirun or srun command, and exec it; or into a
torchrun command for each host, which ``nodes`` runs over ssh.
"""

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
from itertools import takewhile
from pathlib import Path

from hf_zero.errors import ConfigError
from hf_zero.launch import flags, nodes, rank, ssh
from hf_zero.launch import hosts as host_lists
from hf_zero.launch.flags import DEFAULT_HOSTFILE
from hf_zero.launch.hosts import VISIBLE, Host
from hf_zero.launch.placement import DEFAULT_PORT
from hf_zero.launch.rank import VARIABLE
from hf_zero.system.text_file import read_text_file

# Prefixes of the environment variables that are passed to ranks on other hosts.
PREFIXES = (
    *("ACCELERATE_", "CUDA_DEVICE", "DEEPSPEED_", "GLOO_", "HF_", "MKL_", "MLFLOW_", "MV2_", "NCCL_", "OMP_", "PARALLELISM_CONFIG_"),
    *("PYTHON", "TOKENIZERS_", "TORCH_", "TRANSFORMERS_", "UCX_", "WANDB_"),
)
# Where programs and libraries are found; over ssh they are passed too, because interpreter and folder are the same on all hosts.
_PATHS = ("LD_LIBRARY_PATH", "PATH")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def names_passed_on(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables in ``environ`` that are passed to ranks on other hosts, in the order of ``environ``."""
    return [name for name in environ if name.startswith(PREFIXES) and name != VARIABLE and _NAME.fullmatch(name)]


def read_environment_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in the files ``.deepspeed_env`` of the home folder and of the current folder, which takes precedence.

    accelerate writes the variables for other hosts to this file. ``DS_ENV_FILE`` names another file.

    Raises:
        ConfigError: A file cannot be read, or a line is not NAME=VALUE; the message names file and line but shows no content.
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
            raise ConfigError(f"{path}:{number}: the line is not a variable; expected NAME=VALUE, with a name of letters, digits and _")
        values[key.strip()] = value.strip()
    return values


_LOCAL = "localhost"


@dataclass(frozen=True)
class Command:
    """A command that runs on this machine.

    Attributes:
        words: The command line. Any user of the host can read it, so it contains no values of variables.
        variables: Variables added to the command's environment: address and port of rank 0, and the visible devices.
        from_files: Variables of ``.deepspeed_env``, also added; ``variables`` takes precedence. Their values are never shown.
    """

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    from_files: dict[str, str] = field(default_factory=dict)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the command: ``environ`` of this process, with the added variables."""
        return {**environ, **self.from_files, **self.variables}

    def __str__(self) -> str:
        """Return the command as a shell line, followed by the names of the variables whose values are not shown."""
        line = shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), *self.words])
        hidden = [name for name in self.from_files if name not in self.variables]
        return f"{line}\n# with these variables of .deepspeed_env: {', '.join(hidden)}" if hidden else line


def launch(options: argparse.Namespace) -> int:
    """Print the command (``--dry-run``), start all nodes over ssh, or replace this process by the command, so that signals and the exit
    code are the launcher's own.

    Returns:
        The exit code.

    Raises:
        ConfigError: Hosts or flags do not fit together, the program that starts ranks is not installed, or a host is not ready.
    """
    command = build_command(options, os.environ)
    if options.dry_run:
        print(command)
        return 0
    if isinstance(command, nodes.Job):
        return command.run()
    program = shutil.which(command.words[0])
    if program is None:
        raise ConfigError(
            f"--launcher {options.launcher} needs {command.words[0]}, which is not on PATH; install it, or use another launcher"
        )
    _tell_of_hosts(options)
    sys.stdout.flush()
    # Run the user's command without a shell.
    environment = {**command.environment(os.environ), VARIABLE: str(os.getpid())}  # exec keeps the process ID
    os.execve(program, command.words, environment)  # nosec B606
    return 0  # never reached


def _tell_of_hosts(options: argparse.Namespace) -> None:
    """Tell that a single host of another name is not started over ssh, as in DeepSpeed's launcher, or that slots are counted within
    CUDA_VISIBLE_DEVICES, which DeepSpeed's launcher ignores beside a filter; unless ``--log_level`` hides notes.
    """
    if options.log_level not in ("debug", "info"):
        return
    hosts = find_hosts(options, os.environ)
    for host in hosts:
        if host.chosen and host.shown:
            print(
                f"[hf_zero] slots are counted within {VISIBLE}={','.join(host.shown)}; the ranks get {_visible(host)[VISIBLE]}",
                file=sys.stderr,
            )
    if options.launcher in ("", *flags.OVER_SSH) and not options.no_ssh and options.node_rank < 0:
        name = hosts[0].name
        if not nodes.is_this_machine(name):
            print(
                f"[hf_zero] the ranks of {name} start on this machine, {platform.node()}, because a single host is not started over ssh; "
                "--force_multi starts it over ssh",
                file=sys.stderr,
            )


def build_command(options: argparse.Namespace, environ: Mapping[str, str]) -> Command | nodes.Job:
    """Return the command that ``options`` of `hf-zero launch` describe, or the nodes that it starts over ssh.

    Raises:
        ConfigError: Hosts or flags do not fit together; the message names the flag, or the line of the hostfile.
    """
    flags.check(options)
    hosts = find_hosts(options, environ)
    return _over_ssh(options, hosts, environ) if flags.uses_ssh(options, hosts) else _COMMANDS[options.launcher](options, hosts, environ)


def find_hosts(options: argparse.Namespace, environ: Mapping[str, str]) -> list[Host]:
    """Return the hosts of the job after the filters; a job on this machine only has one host named localhost.

    The slots of localhost are those of the devices that ``environ`` shows, so that no rank gets a device outside of its
    CUDA_VISIBLE_DEVICES.
    """
    path = _hostfile(options.hostfile)
    if path:
        hosts = host_lists.read_hostfile(path)
        slots = options.num_gpus
    elif options.launcher == "slurm" and options.num_nodes:
        return []  # Slurm knows its hosts
    else:
        if options.num_nodes > 1:
            raise ConfigError(f"--num_nodes is {options.num_nodes}, but there is no hostfile; give one with --hostfile")
        hosts = [Host(_LOCAL, tuple(range(options.num_gpus or _devices())), shown=_shown(environ))]
        slots = 0
    if options.include:
        hosts = host_lists.include(hosts, options.include)
    if options.exclude:
        hosts = host_lists.exclude(hosts, options.exclude)
        if not hosts:
            raise ConfigError(f"--exclude {options.exclude} leaves no host")
    return host_lists.limit(hosts, options.num_nodes, slots)


def _hostfile(given: str | None) -> str:
    """Return the path of the hostfile; "" for a job on this machine alone: no file is given, or one that stands for none.

    Raises:
        ConfigError: The file that was given does not exist. DeepSpeed would train on this machine alone.
    """
    if given in (None, DEFAULT_HOSTFILE):
        return DEFAULT_HOSTFILE if Path(DEFAULT_HOSTFILE).is_file() else ""
    if given in ("", os.devnull):
        return ""
    if not os.path.exists(given):
        raise ConfigError(
            f"--hostfile is {given!r}, and there is no such file; correct the path, or leave --hostfile out (or give {os.devnull}) to "
            "train on this machine alone"
        )
    return given


def _shown(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the devices in CUDA_VISIBLE_DEVICES, numbers or UUIDs; None if it is not set. As in CUDA, one that is none ends the list."""
    if VISIBLE not in environ:
        return None
    names = map(str.strip, environ[VISIBLE].split(","))
    return tuple(takewhile(lambda name: name not in ("", "NoDevFiles") and not name.startswith("-"), names))


def _devices() -> int:
    import torch  # imported here: only the number of devices needs it

    return max(1, torch.accelerator.device_count()) if torch.accelerator.is_available() else 1


def _script(options: argparse.Namespace) -> list[str]:
    head = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
    return [*head, options.script, *options.script_args]


# -- one function per launcher ------------------------------------------------------------------------------------------


def _standard(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> Command:
    """Return the torchrun command for this host; with several hosts the user runs the same `hf-zero launch` on each."""
    return _torchrun(options, hosts, _own_node_rank(options, hosts) if len(hosts) > 1 else 0, over_ssh=False)


def _torchrun(options: argparse.Namespace, hosts: list[Host], number: int, over_ssh: bool) -> Command:
    """Return the torchrun command for the host ``number``; over ssh, ranks start with output of their own (``rank``).

    Two hyphens end torchrun's flags. Without them its parser rejects an argument of the script that several of its flags begin with (--r).
    """
    host = hosts[number]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(len(host.slots))]
    words += ["--nnodes", str(len(hosts)), "--node_rank", str(number)]
    words += ["--master_addr", _address(options, hosts), "--master_port", str(options.master_port)]
    if options.enable_each_rank_log != "None":
        words += ["--log_dir", options.enable_each_rank_log, "--redirects", "3"]
    words += flags.words_of(options, "launcher_args")
    with_local_rank = rank.wants_local_rank(options)
    kind = ["--module"] if options.module else ["--no_python"] if options.no_python else []
    if with_local_rank or over_ssh:
        words += ["--no_python", "--", sys.executable, "-m", rank.__name__, *(["--local_rank"] if with_local_rank else []), *kind]
    else:
        words += [*kind, "--"]
    return Command([*words, options.script, *options.script_args], _visible(host))


def _over_ssh(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> nodes.Job:
    """Return the nodes that are started over ssh: torchrun on each host."""
    of_this_machine = (VISIBLE,) if _is_local(hosts) else ()
    own = {name: environ[name] for name in (*names_passed_on(environ), *_PATHS, *of_this_machine) if name in environ}
    variables = {**own, **read_environment_files(environ)}
    started, first_rank = [], 0
    for number, host in enumerate(hosts):
        command = _torchrun(options, hosts, number, over_ssh=True)
        started.append(nodes.Node(host.name, command.words, first_rank, len(host.slots), command.variables))
        first_rank += len(host.slots)
    return nodes.Job(
        nodes=started,
        ssh=ssh.words_of_ssh(options.ssh_port, flags.words_of(options, "ssh_args"), environ),
        variables=variables,
        script=options.script,
        kind="module" if options.module else "program" if options.no_python else "script",
        address=_address(options, hosts),
        port=options.master_port,
        is_address_given=bool(options.master_addr),
        checks=not options.no_ssh_check,
        always_ssh=options.force_multi,
        stop_s=ssh.seconds_to_stop(flags.words_of(options, "launcher_args")),
    )


def _address(options: argparse.Namespace, hosts: list[Host]) -> str:
    """Return the host of rank 0."""
    return options.master_addr or (hosts[0].name if len(hosts) > 1 else "127.0.0.1")


def _own_node_rank(options: argparse.Namespace, hosts: list[Host]) -> int:
    if options.node_rank >= len(hosts):
        raise ConfigError(f"--node_rank is {options.node_rank}; with {len(hosts)} hosts 0 to {len(hosts) - 1} are allowed")
    if options.node_rank >= 0:
        return int(options.node_rank)
    own = platform.node()
    for number, host in enumerate(hosts):
        if host.name in (own, own.partition(".")[0]):
            return number
    raise ConfigError(
        f"this machine, {own}, is not in the list of hosts {', '.join(host.name for host in hosts)}. torchrun is started on every host: "
        "pass --node_rank on each host, or let --launcher ssh, openmpi, mpich or slurm start all ranks from one host"
    )


def _visible(host: Host) -> dict[str, str]:
    """Return the variable that shows the ranks of ``host`` the slots that a filter chose; nothing if there was no filter.

    Raises:
        ConfigError: A slot lies outside of the devices that this machine's own CUDA_VISIBLE_DEVICES shows.
    """
    if not host.chosen:
        return {}
    if host.shown is None:
        return {VISIBLE: ",".join(map(str, host.slots))}
    outside = [slot for slot in host.slots if slot >= len(host.shown)]
    if outside and host.shown:
        raise ConfigError(
            f"{host.name} has no slot {outside[0]}: slots are positions in {VISIBLE}={','.join(host.shown)}, so 0 to "
            f"{len(host.shown) - 1} are allowed. Choose others, or unset {VISIBLE}"
        )
    return {} if outside else {VISIBLE: ",".join(host.shown[slot] for slot in host.slots)}


def _open_mpi(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> Command:
    variables, from_files = _common_variables(options, hosts, environ)
    words = [_program("mpirun.openmpi", "mpirun"), "-n", str(sum(len(host.slots) for host in hosts))]
    words += ["--host", ",".join(f"{host.name}:{len(host.slots)}" for host in hosts)]
    own = [] if _is_local(hosts) else names_passed_on(environ)
    for name in dict.fromkeys([*own, *from_files, *variables]):
        words += ["-x", name]  # only the name: mpirun reads the value from its environment
    return Command([*words, *flags.words_of(options, "launcher_args"), *_script(options)], variables, from_files)


def _mpich(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> Command:
    words = [_program("mpirun.mpich", "mpiexec.hydra", "mpirun"), "-n", str(sum(len(host.slots) for host in hosts))]
    words += ["-hosts", ",".join(f"{host.name}:{len(host.slots)}" for host in hosts)]
    # The default, written out. A list of names would not pass PATH and LD_LIBRARY_PATH to ranks on other hosts.
    words += ["-genvall"]
    return Command([*words, *flags.words_of(options, "launcher_args"), *_script(options)], *_common_variables(options, hosts, environ))


def _slurm(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> Command:
    words = ["srun"]
    if hosts and hosts[0].name != _LOCAL:
        per_host = {len(host.slots) for host in hosts}
        if len(per_host) > 1:
            raise ConfigError(
                f"--launcher slurm: hosts have {sorted(per_host)} slots, but srun starts the same number of ranks on each; set --num_gpus"
            )
        words += ["--nodes", str(len(hosts)), "--nodelist", ",".join(host.name for host in hosts), "--ntasks-per-node", str(per_host.pop())]
    elif hosts:
        words += ["--ntasks", str(len(hosts[0].slots))]
    else:
        words += ["--nodes", str(options.num_nodes), *(["--ntasks-per-node", str(options.num_gpus)] if options.num_gpus else [])]
    for name in ("comment", "account"):
        words += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
    variables = {"MASTER_ADDR": options.master_addr} if options.master_addr else {}
    if options.master_port != DEFAULT_PORT:
        variables["MASTER_PORT"] = str(options.master_port)
    variables.update(_common_devices(options, hosts))
    from_files = {} if _is_local(hosts) else read_environment_files(environ)
    # Pass only srun's own environment: further variables would be list items of this option, which a comma in a value breaks.
    return Command([*words, "--export=ALL", *flags.words_of(options, "launcher_args"), *_script(options)], variables, from_files)


def _is_local(hosts: list[Host]) -> bool:
    """Return whether all ranks run on this machine; False for an empty list, with which Slurm chooses the hosts."""
    return bool(hosts) and all(host.name == _LOCAL for host in hosts)


def _common_variables(options: argparse.Namespace, hosts: list[Host], environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables for every rank (address and port of rank 0, chosen devices), and the variables of ``.deepspeed_env``, which
    only ranks on other hosts need.
    """
    local = _is_local(hosts)
    address = options.master_addr or ("127.0.0.1" if local else hosts[0].name)
    variables = {"MASTER_ADDR": address, "MASTER_PORT": str(options.master_port), **_common_devices(options, hosts)}
    return variables, {} if local else read_environment_files(environ)


def _common_devices(options: argparse.Namespace, hosts: list[Host]) -> dict[str, str]:
    visible = [_visible(host) for host in hosts]
    if any(entry != visible[0] for entry in visible):
        raise ConfigError(
            f"--launcher {options.launcher}: {' and '.join(host.name for host in hosts)} use different devices, but this "
            "launcher sets the same CUDA_VISIBLE_DEVICES on all hosts. Choose the same slots on each host"
        )
    return visible[0] if visible else {}


def _program(*names: str) -> str:
    """Return the first of ``names`` that is installed; otherwise the last one, which an error message then names."""
    return next((name for name in names if shutil.which(name)), names[-1])


_COMMANDS: dict[str, Callable[[argparse.Namespace, list[Host], Mapping[str, str]], Command]] = {
    "": _standard,
    "standard": _standard,
    "openmpi": _open_mpi,
    "mpich": _mpich,
    "mvapich": _mpich,  # its mpirun is hydra, as in MPICH
    "slurm": _slurm,
    "ssh": _standard,  # a single host
    "pdsh": _standard,
}
