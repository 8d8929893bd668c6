"""Open the store in which ranks meet: the launcher's store, or one that listens only at the address of rank 0."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from hf_zero.errors import CollectiveError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_made = 0  # number of default groups so far: a second one must not find the addresses of the first
# Stores of rank 0, by address and port, kept for the life of the process: a rank that is ahead opens the next group where the last one met,
# and its messages there would be lost if that store were freed with the last group.
_listening: dict[tuple[str, int], dist.Store] = {}


def store_at_address(timeout: timedelta, environ: Mapping[str, str] | None = None) -> dist.Store | None:
    """Return the store at MASTER_ADDR and MASTER_PORT; None if torch's own store is to be used. The same on every rank.

    [Note: where the store listens] torch's own store listens on all interfaces, and any process that reaches it can read and change the
    entries of the ranks. If MASTER_ADDR is a number, like 127.0.0.1 for ranks on one host, every rank connects to exactly that address, so
    rank 0 needs to listen only there. Names are left to torch: rank 0 may resolve its name to a loopback address (Debian's /etc/hosts
    does) that no other host reaches. torchrun is left to torch too, because its store is in another process.

    Args:
        timeout: Longest time to wait for the other ranks.
        environ: Variables to read, by default those of the process.
    """
    global _made
    environ = os.environ if environ is None else environ
    if any(not environ.get(name) for name in _NEEDED) or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    try:
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        return None
    _made += 1
    first = environ["RANK"] == "0"
    listening = _listen(family, address, port) if first else None
    store = dist.TCPStore(address, port, int(environ["WORLD_SIZE"]), first, timeout, multi_tenant=True, master_listen_fd=listening)
    if first:
        _listening.setdefault((address, port), store)
    return dist.PrefixStore(f"hf_zero_group_{_made}", store)


def store_of_launcher(timeout: timedelta) -> dist.Store | None:
    """Return the part of torchrun's store that belongs to this attempt; None if torchrun has made no store.

    [Note: stores of restarted runs] The ranks of a restarted run meet in the store of the launcher, which may still be the store of the
    attempt before: a rank then finds the address of a dead rank, and the attempt fails (always with accelerate's launcher, sometimes with
    torchrun). Attempts are counted alike on one machine only; over several machines PyTorch's own method is used. The default groups of
    one process are counted too: after ``destroy_process_group`` (``accelerator.end_training`` calls it) the next group would find the
    addresses of the last.
    """
    global _made
    variables = os.environ
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or variables.get("GROUP_WORLD_SIZE") != "1":
        return None
    address, port, world = variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), int(variables["WORLD_SIZE"])
    store = dist.TCPStore(address, port, world, is_master=False, timeout=timeout)
    _made += 1
    return dist.PrefixStore(f"attempt_{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}_group_{_made}", store)


def _listen(family: socket.AddressFamily, address: str, port: int) -> int | None:
    """Return a listening socket; None if this host does not have the address (rank 0 behind a translated one) or the port is taken."""
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((address, port))
        opened.listen(socket.SOMAXCONN)
    except OSError:
        opened.close()
        return None
    return opened.detach()


@contextmanager
def meeting(timeout: timedelta) -> Iterator[None]:
    """Wrap the meeting of the ranks in a context that turns an error into one line with this rank and the address.

    Args:
        timeout: Longest time to wait for the other ranks.

    Raises:
        CollectiveError: Rank 0 cannot be reached, or a rank is missing.
    """
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        rank, world, address, port = (os.environ.get(name, "?") for name in _NEEDED)
        me, place = f"rank {rank} of {world} on {socket.gethostname()}", f"{address}:{port}"
        text = (
            f"{me} could not meet the other ranks at {place}: {reason}. Read the logs of the other ranks, and check that they "
            "can reach this address"
        )
        if rank != "0":
            text = (
                f"{me} did not reach rank 0 at {place} within {timeout.total_seconds():g} s: {reason}. Is MASTER_ADDR the host of rank 0, "
                "does rank 0 run, and may this host connect to MASTER_PORT there?"
            )
        raise CollectiveError(f"{text} DEEPSPEED_TIMEOUT sets the number of minutes to wait") from None
