"""Check whether host memory suffices before it is allocated, because the system kills a process that takes too much."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.errors import HostMemoryError
from hf_zero.system.sizes import gib

_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2^63 for "none"


@dataclass(frozen=True)
class FreeMemory:
    """Host memory that may still be allocated.

    Attributes:
        nbytes: The smallest of the limits that hold for this process.
        limit: Description of this limit with its numbers, for messages.
    """

    nbytes: int
    limit: str


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> FreeMemory | None:
    """Return the memory that the machine and the cgroups of this process leave; None if neither reports it (not Linux).

    Memory of the page cache that the kernel would give back counts as free.

    Args:
        proc: Mount point of the kernel's process file system.
        cgroups: Mount point of the cgroup file systems.
    """
    found = [*_of_machine(proc), *_of_cgroups(proc, cgroups)]
    return min(found, key=lambda free: free.nbytes, default=None)


def _of_machine(proc: Path) -> Iterator[FreeMemory]:
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines(proc / "meminfo") if line.endswith("kB")}
    if "MemAvailable" in values:
        free = values["MemAvailable"]
        yield FreeMemory(free, f"the machine has {gib(free)} available of {gib(values.get('MemTotal', free))}")


def _of_cgroups(proc: Path, mount: Path) -> Iterator[FreeMemory]:
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, names = [mount, mount / "unified"], ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            roots, names = [mount / "memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for root in roots:
            yield from _up_from(root, path, names)


def _up_from(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[FreeMemory]:
    """Yield the limits of a cgroup and of all above it; inside a container the path may not exist and the root is the container's own."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:depth])
        limit, used = _number(folder / names[0]), _number(folder / names[1])
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        statistics = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat") if " " in line)
        cached = int(statistics.get(names[2], 0))
        text = f"cgroup /{'/'.join(parts[:depth])} allows {gib(limit)}, of which {gib(used)} are used ({gib(cached)} of that page cache)"
        yield FreeMemory(max(0, limit - used + cached), text)


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "max").strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def require_host_memory(need: Mapping[str, int], gather: Callable[[Any], list[Any]], remedy: str) -> None:
    """Raise on every rank if the allocations of the ranks of a machine do not fit into its free memory; collective.

    Args:
        need: Bytes that this rank is about to allocate in host memory, by purpose.
        gather: Gives every rank's value to every rank, in rank order.
        remedy: Advice to the user, as the end of a sentence.

    Raises:
        HostMemoryError: On every rank; the message has the numbers of the first machine with too little memory.
    """
    free = free_memory()
    mine = (platform.node(), dict(need), free.nbytes if free else None, free.limit if free else "")
    machines: dict[str, list[tuple[str, dict[str, int], int | None, str]]] = {}
    for answer in gather(mine):
        machines.setdefault(answer[0], []).append(answer)
    for machine, answers in machines.items():
        wanted = sum(sum(parts.values()) for _, parts, _, _ in answers)
        known = [(free_bytes, limit) for _, _, free_bytes, limit in answers if free_bytes is not None]
        if not known or wanted <= min(known)[0]:
            continue
        parts = ", ".join(f"{name} {gib(size)}" for name, size in answers[0][1].items())
        raise HostMemoryError(
            f"offloading needs {gib(wanted)} of host memory on {machine} for {len(answers)} rank(s) ({parts} on the first of them), but "
            f"{gib(min(known)[0])} are free: {min(known)[1]}. {remedy}"
        )
