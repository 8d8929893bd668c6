"""Start torch.distributed: the store in which ranks meet, and the default process group, with back end and timeout that fit this rank."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.comm.process_groups import FAKE, default_device
from hf_zero.errors import CollectiveError, ConfigError
from hf_zero.launch.placement import export_placement, require_address
from hf_zero.launch.rank import end_with_launcher
from hf_zero.observe import log_rank0
from hf_zero.system.last_words import report_to_launcher

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_made = 0  # number of default groups so far: a second one must not find the addresses of the first
# Stores of rank 0, by address and port, kept for the life of the process: a rank that is ahead opens the next group where the last one met,
# and its messages there would be lost if that store were freed with the last group.
_listening: dict[tuple[str, int], dist.Store] = {}
MINUTES = 10.0
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
def rendezvous_errors(timeout: timedelta) -> Iterator[None]:
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


def default_backend() -> str:
    """Return the back end that torch.distributed recommends for this rank's device (nccl, xccl, ...); gloo on a CPU or without any."""
    device = default_device()
    try:
        return "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    except ValueError:
        return "gloo"


def default_timeout() -> timedelta:
    """Return the timeout of collectives: 10 minutes as in DeepSpeed, or the minutes in the variable ``DEEPSPEED_TIMEOUT``.

    Raises:
        ConfigError: The variable is not a number.
    """
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if minutes is not None:
        try:
            return timedelta(minutes=float(minutes))
        except ValueError:
            raise ConfigError(f"environment variable DEEPSPEED_TIMEOUT is {minutes!r}, a number of minutes is allowed") from None
    return timedelta(minutes=MINUTES)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create the default torch.distributed group if there is none.

    Make this rank's device the current one, also where a script has made the group: torch.distributed sends objects from the current
    device, which by default is the first device on all ranks. A device that the script has chosen itself stays current.

    The arguments are those of DeepSpeed's function of the same name. Ranks come from RANK, WORLD_SIZE, ... or, under mpirun and srun,
    from the variables that these set (``hf_zero.launch.placement``). Without a launcher's environment the process becomes a group of one,
    with no port opened.

    Args:
        dist_backend: Name of a torch.distributed back end; None takes the default of the device.
        auto_mpi_discovery: Look at the variables of mpirun and srun when RANK is not set.
        distributed_port: Port of rank 0 when the environment names no MASTER_PORT.
        verbose: Log one line on rank 0.
        timeout: Longest time a collective may take.
        init_method: Passed to torch.distributed.
        dist_init_required: False with no group is an error; None and True create one.
        config: Ignored, for compatibility.
        rank: Rank; overrides the environment.
        world_size: Number of ranks; overrides the environment.

    Raises:
        ConfigError: The environment is incomplete, or no group exists and ``dist_init_required`` is False.
        CollectiveError: The ranks did not meet: rank 0 cannot be reached, or a rank is missing.
    """
    end_with_launcher()
    report_to_launcher()
    device = default_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError("dist_init_required is False but there is no torch.distributed process group; create one first or pass None")
    if auto_mpi_discovery and init_method is None and rank < 0:
        export_placement(port=distributed_port)
    backend = dist_backend or default_backend()
    timeout = timeout or default_timeout()
    if init_method is None and rank < 0 and "RANK" not in os.environ:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but RANK is not set; start with torchrun or accelerate launch")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        require_address(os.environ)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        missing = [name for name in _RENDEZVOUS if name not in os.environ]
        if init_method is None and rank < 0 and missing:
            raise ConfigError(f"environment variables {', '.join(missing)} are missing; start with torchrun or accelerate launch")
        with rendezvous_errors(timeout):
            store = (store_of_launcher(timeout) or store_at_address(timeout)) if init_method is None and rank < 0 else None
            if store is not None:
                rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(backend, init_method=init_method, store=store, rank=rank, world_size=world_size, timeout=timeout)
    if verbose:
        log_rank0("process group: backend %s, %d rank(s), timeout %s", backend, dist.get_world_size(), timeout)


def pretend_distributed(rank: int, ranks: int, device: torch.device) -> None:
    """Make this process ``rank`` of a default group whose other ranks do not exist, for a memory plan.

    Args:
        rank: Rank of this process.
        ranks: Number of ranks in the group.
        device: Device of the collectives, beside the CPU.
    """
    import torch.distributed._tools.fake_collectives  # noqa: F401 - gives collectives their shapes, which torch 2.8 does not by itself
    from torch.testing._internal.distributed import fake_pg  # registers torch's fake back end for the devices it knows

    kinds = dict.fromkeys(("cpu", device.type))
    known = dist.Backend._plugins[FAKE.upper()]  # torch 2.8 registers a function with other arguments than newer versions do
    dist.Backend.register_backend(FAKE, known.creator_fn, extended_api=known.extended_api, devices=list(kinds))
    dist.init_process_group(",".join(f"{kind}:{FAKE}" for kind in kinds), store=fake_pg.FakeStore(), rank=rank, world_size=ranks)
