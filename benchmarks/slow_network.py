"""Network namespaces joined by a bridge, each behind a link of limited speed; needs root, and cleans up after itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BRIDGE = "hfzbr"
LINK = "hfzlink"  # of every namespace, inside it
# Bytes the bucket holds: enough for one tick of the kernel's clock at that rate, little against a message.
BURSTS = {"100mbit": "64kb", "1gbit": "256kb", "10gbit": "2mb"}


@dataclass(frozen=True)
class Namespaces:
    """What ``slow_network`` made: one namespace per rank."""

    names: list[str]

    def address(self, rank: int) -> str:
        """Address of a rank."""
        return f"10.77.0.{rank + 1}"

    def limit(self, rate: str) -> None:
        """Sets the speed of all links, both ways; ``rate`` is one of ``BURSTS``."""
        shape = ["root", "tbf", "rate", rate, "burst", BURSTS[rate], "latency", "100ms"]
        for rank, name in enumerate(self.names):
            _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", LINK, *shape)
            _run("tc", "qdisc", "replace", "dev", f"hfzport{rank}", *shape)

    def command(self, rank: int, words: list[str]) -> list[str]:
        """``words`` run inside the namespace of a rank."""
        return ["ip", "netns", "exec", self.names[rank], *words]


def why_not() -> str:
    """Why this machine cannot have such a network; "" when it can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found (Debian: iproute2)" if missing else ""


@contextmanager
def slow_network(ranks: int) -> Iterator[Namespaces]:
    """A namespace per rank; gone when the ``with`` ends, however it ends, and what a killed run left is removed first."""
    made = Namespaces([f"hfz{rank}" for rank in range(ranks)])
    _remove(8)
    try:
        _run("ip", "link", "add", "name", BRIDGE, "type", "bridge")
        _run("ip", "link", "set", BRIDGE, "up")
        for rank, name in enumerate(made.names):
            port = f"hfzport{rank}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", port, "type", "veth", "peer", "name", LINK, "netns", name)
            _run("ip", "link", "set", port, "master", BRIDGE, "up")
            _run("ip", "-n", name, "address", "add", f"{made.address(rank)}/24", "dev", LINK)
            _run("ip", "-n", name, "link", "set", LINK, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        _remove(ranks)


def _remove(ranks: int) -> None:
    for rank in range(ranks):
        _run("ip", "link", "del", f"hfzport{rank}", check=False)
        _run("ip", "netns", "del", f"hfz{rank}", check=False)
    _run("ip", "link", "del", BRIDGE, check=False)


def _run(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def sent_bytes() -> int:
    """Bytes this namespace has put on its link, Ethernet headers and acknowledgements included."""
    with open("/proc/net/dev", encoding="ascii") as table:
        line = next(line for line in table if line.strip().startswith(f"{LINK}:"))
    return int(line.partition(":")[2].split()[8])
