"""Declare the flags of `hf-zero launch`: those of DeepSpeed's launcher, and refuse the ones that hf_zero does not serve."""

from __future__ import annotations

import argparse
import shlex

from hf_zero.errors import ConfigError
from hf_zero.launch.hosts import MOST_SLOTS, Host, both_filters
from hf_zero.launch.placement import DEFAULT_PORT

DEFAULT_HOSTFILE = "/job/hostfile"
OVER_SSH = ("ssh", "pdsh")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LAUNCHERS = ("standard", "openmpi", "mpich", "mvapich", "slurm", *OVER_SSH)
# Flags of DeepSpeed's launcher -> number of values -> what to use instead.
_REFUSED = {
    "--venv_script": (1, "ranks use the interpreter of this command, on every host; run the command in the activated environment"),
    "--save_pid": (0, "the process that you start is the launcher, so the shell knows its number: `hf-zero launch ... & echo $!`"),
    "--autotuning": (1, "`hf-zero plan MODEL` predicts memory and time of a configuration without a run"),
    "--elastic_training": (0, "the number of ranks is fixed; run `torchrun --nnodes MIN:MAX --rdzv_backend c10d` on each host"),
    "--min_elastic_nodes": (1, "the number of ranks is fixed; run `torchrun --nnodes MIN:MAX --rdzv_backend c10d` on each host"),
    "--max_elastic_nodes": (1, "the number of ranks is fixed; run `torchrun --nnodes MIN:MAX --rdzv_backend c10d` on each host"),
    "--bind_cores_to_rank": (0, 'torchrun binds ranks: --launcher_args="--numa-binding node"'),
    "--bind_core_list": (1, 'torchrun binds ranks: --launcher_args="--numa-binding node"'),
}
_UNSET = "-1"  # DeepSpeed's default of flags with a number
_OF_SLURM = ("comment", "account")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of DeepSpeed's launcher, ``--ssh_args`` and ``--dry-run``.

    Args:
        parser: A parser with ``allow_abbrev=False``: it would take arguments of the script for abbreviations of flags otherwise.
    """
    add = parser.add_argument
    add(
        "-H",
        "--hostfile",
        help=f"file with lines like 'worker-1 slots=4' (default {DEFAULT_HOSTFILE} if it exists; else, and for /dev/null, this machine)",
    )
    add("-i", "--include", default="", help="hosts and slots to use: worker-0@worker-1:0,2")
    add("-e", "--exclude", default="", help="hosts and slots to exclude; cannot be combined with --include")
    add("--num_nodes", type=_most, default=0, help="use the first N hosts (default, and -1: all)")
    add(
        "--num_gpus",
        "--num_accelerators",
        type=_slots,
        default=0,
        help="ranks per host (default, and -1: the slots of the host, or the devices of this machine)",
    )
    add("--master_addr", default="", help="host of rank 0 (default: the first one)")
    add("--master_port", type=_count, default=DEFAULT_PORT, help=f"port of rank 0 (default {DEFAULT_PORT})")
    add(
        "--launcher",
        type=str.lower,
        default="",
        choices=sorted(LAUNCHERS),
        help="program that starts the ranks (default: ssh with several hosts, else standard, which is torchrun on this host; pdsh is ssh)",
    )
    add("--launcher_args", default="", help="further arguments of torchrun (also over ssh), mpirun or srun, in one string")
    add("--ssh_args", default="", help="further arguments of ssh, in one string")
    add("--ssh_port", type=_count, default=0, help="port of the ssh servers (default: that of the ssh configuration, 22)")
    add("--no_ssh_check", action="store_true", help="start over ssh without comparing versions and looking for the script on each host")
    add("--no_ssh", action="store_true", help="start the ranks of this host alone; run the command on every host")
    add("--node_rank", type=int, default=-1, help="number of this host, whose ranks alone are started")
    add("--force_multi", action="store_true", help="start every host over ssh, also this one, and a single one")
    add("--module", action="store_true", help="the script is a module, run as python -m")
    add("--no_python", action="store_true", help="the script is a program, run without python")
    add(
        "--no_local_rank",
        action="store_true",
        help="with torchrun: do not pass --local_rank, even to a script whose source declares this argument",
    )
    add("--enable_each_rank_log", default="None", metavar="FOLDER", help="with torchrun: write the output of each rank to files there")
    add("--log_level", default="info", choices=LOG_LEVELS, help="levels above info hide the notes of this command, not those of the ranks")
    add("-q", "--quiet", dest="log_level", action="store_const", const="error", help="the same as --log_level error")
    for name in _OF_SLURM:
        add(f"--{name}", default="", help=f"--{name} of srun")
    for flag, (values, _) in _REFUSED.items():
        if values:
            add(flag, help=argparse.SUPPRESS)
        else:
            add(flag, action="store_const", const=flag, help=argparse.SUPPRESS)
    add("--dry-run", "--dry_run", action="store_true", help="print the command without running it")
    add("script", help="training script, module or program")
    add("script_args", nargs=argparse.REMAINDER, help="arguments of the script")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return number


def _most(text: str) -> int:
    """Return the number of hosts or slots in ``text``; 0, which means all, for the -1 that is DeepSpeed's default."""
    return 0 if text.strip() == _UNSET else _count(text)


def _slots(text: str) -> int:
    number = _most(text)
    if number > MOST_SLOTS:
        raise argparse.ArgumentTypeError(f"{text} is above the limit of {MOST_SLOTS} ranks on one host")
    return number


def check(options: argparse.Namespace) -> None:
    """Raise if flags exclude each other, or belong to something that hf_zero does not have.

    Raises:
        ConfigError: The message names the flags, and what to use instead.
    """
    for flag, (_, instead) in _REFUSED.items():
        if getattr(options, flag[2:]) not in (None, _UNSET):
            raise ConfigError(f"{flag} is not supported: {instead}")
    if options.module and options.no_python:
        raise ConfigError("--module and --no_python exclude each other, because a module needs python; remove one of them")
    if options.include and options.exclude:
        raise both_filters()
    named, of_torchrun = f"--launcher {options.launcher}", options.launcher in ("", "standard", *OVER_SSH)
    for name in ("ssh_args", "ssh_port", "no_ssh_check"):
        if getattr(options, name) and not of_torchrun:
            raise ConfigError(f"--{name} is for ssh, which {named} does not use; remove it, or use --launcher ssh")
    if options.enable_each_rank_log != "None" and not of_torchrun:
        raise ConfigError(f"--enable_each_rank_log is for torchrun; give {named} its own arguments for this with --launcher_args")
    for name in _OF_SLURM:
        if getattr(options, name) and options.launcher != "slurm":
            raise ConfigError(f"--{name} is for srun; remove it, or use --launcher slurm")
    if options.launcher in OVER_SSH and options.node_rank >= 0 and not options.no_ssh:
        raise ConfigError(f"--node_rank starts only the ranks of this host, but {named} the ranks of all hosts; remove one of them")
    if options.launcher == "standard" and options.force_multi and not options.no_ssh:
        raise ConfigError(
            "--launcher standard starts only the ranks of this host, but --force_multi the ranks of all hosts; remove one of them"
        )
    if options.launcher == "pdsh" and options.launcher_args:
        raise ConfigError(
            "--launcher pdsh is ssh here, so arguments of pdsh have no meaning: give arguments of ssh with --ssh_args, and arguments of "
            "torchrun with --launcher ssh --launcher_args"
        )


def uses_ssh(options: argparse.Namespace, hosts: list[Host]) -> bool:
    """Return whether this command starts the ranks of ``hosts`` over ssh: several hosts, as DeepSpeed's launcher does, unless a flag
    selects another launcher or only this host.
    """
    if options.no_ssh or options.node_rank >= 0 or options.launcher not in ("", *OVER_SSH):
        return False
    return len(hosts) > 1 or bool(options.force_multi)


def words_of(options: argparse.Namespace, name: str) -> list[str]:
    """Return the words of a flag such as ``launcher_args`` that holds several arguments in one string.

    Raises:
        ConfigError: Quotes are not closed.
    """
    return split_words(getattr(options, name), f"--{name}")


def split_words(text: str, name: str) -> list[str]:
    """Return the words of ``text`` as a shell splits it; ``name`` is for the error, a ConfigError if quotes are not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{name} {text!r} cannot be split into words: {error}") from error
