"""Network namespaces joined by a bridge, each behind a link of limited speed; needs root, and cleans up after itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LINK = "hfzlink"  # name of the link inside every namespace
# Bytes that the token bucket holds: enough for one tick of the kernel's clock at that rate, small beside a message.
BURSTS = {"100mbit": "64kb", "1gbit": "256kb", "10gbit": "2mb"}


@dataclass(frozen=True)
class Namespaces:
    """The namespaces that ``slow_network`` made: one per rank, or per node.

    Attributes:
        names: Names of the namespaces.
        prefix: Prefix of all names of this network.
    """

    names: list[str]
    prefix: str = "hfz"

    def address(self, rank: int) -> str:
        """Return the address of a rank."""
        return f"10.77.0.{rank + 1}"

    def port(self, rank: int) -> str:
        """Return the name of the other end of a rank's link, outside its namespace."""
        return f"{self.prefix}port{rank}"

    def cut(self, rank: int) -> None:
        """Take a rank's link down; no process is notified, and sent data is lost."""
        _run("ip", "link", "set", self.port(rank), "down")

    def mend(self, rank: int) -> None:
        """Bring a rank's link up again."""
        _run("ip", "link", "set", self.port(rank), "up")

    def limit(self, rate: str) -> None:
        """Set the speed of all links, in both directions; ``rate`` is one of ``BURSTS``."""
        shape = ["root", "tbf", "rate", rate, "burst", BURSTS[rate], "latency", "100ms"]
        for rank, name in enumerate(self.names):
            _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", LINK, *shape)
            _run("tc", "qdisc", "replace", "dev", self.port(rank), *shape)

    def command(self, rank: int, words: list[str]) -> list[str]:
        """Return the command that runs ``words`` inside the namespace of a rank."""
        return ["ip", "netns", "exec", self.names[rank], *words]


def why_not() -> str:
    """Return the reason why this machine cannot have such a network; "" when it can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found (Debian: iproute2)" if missing else ""


@contextmanager
def slow_network(ranks: int, prefix: str = "hfz", mtu: int = 1500) -> Iterator[Namespaces]:
    """Make a namespace per rank, and remove them when the ``with`` ends in any way; first remove those that a killed run has left.

    Args:
        ranks: Number of namespaces.
        prefix: Prefix of names, at most 5 letters; networks with different prefixes are independent.
        mtu: Bytes of the largest packet. Where the bucket holds less than 64 KiB and headers, the kernel cuts messages into such packets
            and the counters include all their headers; otherwise it passes a message on whole, with one header.
    """
    made, bridge = Namespaces([f"{prefix}{rank}" for rank in range(ranks)], prefix), f"{prefix}br"
    _remove(made, 8)
    try:
        _run("ip", "link", "add", "name", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for rank, name in enumerate(made.names):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", made.port(rank), "type", "veth", "peer", "name", LINK, "netns", name)
            _run("ip", "link", "set", made.port(rank), "mtu", str(mtu), "master", bridge, "up")
            _run("ip", "-n", name, "address", "add", f"{made.address(rank)}/24", "dev", LINK)
            _run("ip", "-n", name, "link", "set", LINK, "mtu", str(mtu), "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        _remove(made, ranks)


def _remove(made: Namespaces, ranks: int) -> None:
    for rank in range(ranks):
        _run("ip", "link", "del", made.port(rank), check=False)
        _run("ip", "netns", "del", f"{made.prefix}{rank}", check=False)
    _run("ip", "link", "del", f"{made.prefix}br", check=False)


def _run(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def sent_bytes() -> int:
    """Return the bytes that this namespace has sent over its link, Ethernet headers and acknowledgements included."""
    with open("/proc/net/dev", encoding="ascii") as table:
        line = next(line for line in table if line.strip().startswith(f"{LINK}:"))
    return int(line.partition(":")[2].split()[8])
