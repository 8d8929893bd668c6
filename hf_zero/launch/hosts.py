"""Read the hosts and slots of a job from the hostfile, and apply the filters of DeepSpeed's launcher."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hf_zero.errors import ConfigError
from hf_zero.system.text_file import read_text_file

VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_SLOTS = 4096
"""Largest number of slots of one host: more than any machine has devices, and few enough to list."""
_LINE = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*)\s+slots=(?P<slots>[0-9]+)", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A machine and the indices of its devices that are used.

    Attributes:
        name: Name of the machine.
        slots: Indices of the devices, one for each rank.
        chosen: Whether a filter selected them by index.
        shown: For this machine: the devices of its CUDA_VISIBLE_DEVICES, which the slots index; None if all devices are visible.
    """

    name: str
    slots: tuple[int, ...]
    chosen: bool = False
    shown: tuple[str, ...] | None = None


def read_hostfile(path: str) -> list[Host]:
    """Return the hosts of a file with lines like ``worker-1 slots=4``; ``#`` begins a comment.

    Raises:
        ConfigError: The file cannot be read or has no host, or a line is wrong; the message names file and line.
    """
    return parse_hostfile(read_text_file(path, "hostfile").split("\n"), path)


def parse_hostfile(text: Iterable[str], path: str) -> list[Host]:
    """Return the hosts in the lines ``text`` of a hostfile, like ``read_hostfile``; ``path`` is for messages."""
    hosts: dict[str, int] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text, start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        found = _LINE.fullmatch(content)
        if found is None:
            raise ConfigError(f"{path}:{number}: {_cut(content)!r} is not a host; expected a name and its slots, like: worker-1 slots=4")
        name, slots = found["host"], _count(found["slots"])
        if not 1 <= slots <= MOST_SLOTS:
            raise ConfigError(
                f"{path}:{number}: {_cut(name)} has {_cut(found['slots'])} slots; expected 1 to {MOST_SLOTS}; correct or remove the line"
            )
        if name in hosts:
            raise ConfigError(f"{path}:{number}: {_cut(name)} is listed twice, first in line {lines[name]}; write one line per host")
        hosts[name], lines[name] = slots, number
    if not hosts:
        raise ConfigError(f"{path} contains no host; expected lines like: worker-1 slots=4")
    return [Host(name, tuple(range(slots))) for name, slots in hosts.items()]


def _count(digits: str) -> int:
    """Return the number, or 10**9 for more than 9 digits, which every check refuses; Python cannot convert thousands of digits."""
    return int(digits) if len(digits) <= 9 else 10**9


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def include(hosts: list[Host], text: str) -> list[Host]:
    """Return the hosts and slots that ``text`` selects, such as ``worker-0@worker-1:0,2``, in the order of ``text``.

    Raises:
        ConfigError: ``text`` names a host or slot that does not exist.
    """
    known = {host.name: host for host in hosts}
    picked = _parse(text, known, "--include")
    return [replace(known[name], slots=slots, chosen=True) if slots is not None else known[name] for name, slots in picked.items()]


def exclude(hosts: list[Host], text: str) -> list[Host]:
    """Return ``hosts`` without the hosts and slots that ``text`` names; a host without remaining slots is removed. The result may be empty.

    Raises:
        ConfigError: ``text`` names a host or slot that does not exist.
    """
    dropped = _parse(text, {host.name: host for host in hosts}, "--exclude")
    left = []
    for host in hosts:
        without = dropped.get(host.name, ())
        slots = () if without is None else tuple(slot for slot in host.slots if slot not in without)
        if slots:
            left.append(replace(host, slots=slots, chosen=host.chosen or bool(without)))
    return left


def both_filters() -> ConfigError:
    """Return the error for --include and --exclude in one command."""
    return ConfigError("--include and --exclude cannot be combined; use one of them")


def _parse(text: str, known: dict[str, Host], flag: str) -> dict[str, tuple[int, ...] | None]:
    picked: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        if name not in known:
            raise ConfigError(f"{flag} {text}: host {name!r} is unknown; known: {', '.join(known)}")
        if name in picked:
            raise ConfigError(f"{flag} {text}: host {name} is listed twice; join its slots with commas")
        picked[name] = _slots(numbers, known[name], f"{flag} {text}") if colon else None
    return picked


def _slots(numbers: str, host: Host, what: str) -> tuple[int, ...]:
    slots = []
    for text in numbers.split(","):
        if not (text.isascii() and text.isdigit()) or _count(text) not in host.slots:
            within = f", counted within {VISIBLE}={','.join(host.shown)}" if host.shown else ""
            raise ConfigError(f"{what}: {host.name} has no slot {text!r}; it has {', '.join(map(str, host.slots))}{within}")
        slots.append(_count(text))
    return tuple(sorted(set(slots)))


def limit(hosts: list[Host], nodes: int, slots: int) -> list[Host]:
    """Return the first ``nodes`` hosts with their first ``slots`` slots; 0 means no limit.

    Raises:
        ConfigError: There are fewer hosts or slots.
    """
    if nodes > len(hosts):
        raise ConfigError(f"--num_nodes is {nodes}, but there are only {len(hosts)} hosts")
    chosen = hosts[:nodes] if nodes else hosts
    for host in chosen:
        if slots > len(host.slots):
            raise ConfigError(f"--num_gpus is {slots}, but {host.name} has only {len(host.slots)} slots")
    return [replace(host, slots=host.slots[:slots]) for host in chosen] if slots else chosen
