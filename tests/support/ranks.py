"""Run a function on N gloo ranks under a time limit.

Importing torch and transformers costs seconds, so ranks are processes that live on between calls: one pool per world size, forked from a
server that imported both, and hf_zero, once. Every call gets a new process group, new seeds and its own launcher environment. A call that
fails, hangs or loses a rank raises ``RankError`` with the text of every rank, and its pool is discarded.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib.util
import io
import logging
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

from tests import pretend
from tests.support import collective_order
from tests.support.processes import PATIENCE

PRELOAD = (
    *("tests.support.alias_first", "torch", "torch.distributed", "numpy", "transformers.modeling_utils"),
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("gpt2", "llama", "t5", "bart", "albert", "mixtral", "deberta_v2", "blenderbot", "vit")
    ),
    *("transformers.trainer", "pytest", "hypothesis", "tests.support.parity", "tests.support.preloaded"),
)
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
IDLE_CALLS = 8  # calls of other pools after which a pool ends: gloo's thread wakes a hundred times a second in each idle rank
GLOO_NICENESS = 10
GRACE_SECONDS = 5.0  # time for the other ranks to report after one rank has failed
LOG_TAIL_CHARS = 4000


class RankError(AssertionError):
    """Error raised if a rank raised, died or was still running at the time limit. ``outcomes`` holds one entry per rank."""

    def __init__(self, name: str, outcomes: list[RankOutcome]) -> None:
        self.outcomes = outcomes
        parts = [f"{name} failed on {sum(not o.ok for o in outcomes)} of {len(outcomes)} ranks"]
        parts += [f"--- rank {o.rank}: {o.status} after {o.seconds:.1f} s\n{o.text}" for o in outcomes]
        super().__init__("\n".join(parts))


@dataclass(frozen=True)
class RankOutcome:
    """Outcome of one rank: its value and collectives, or the text of its traceback, exit or stack at the time limit."""

    rank: int
    status: Literal["ok", "error", "died", "hung"]
    seconds: float
    value: Any = None
    text: str = ""
    record: collective_order.Record = field(default_factory=collective_order.Record)

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class Job:
    """One call in the form that is sent to a rank. ``store`` is None when the function creates its process group itself."""

    payload: bytes  # pickled (function, args)
    store: str | None
    port: int
    group_timeout: float
    env: dict[str, str] = field(default_factory=dict)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float = 90.0,
    group: bool = True,
    env: dict[str, str] | None = None,
    ordered: bool = True,
) -> list[Any]:
    """Call ``function(*args)`` on every rank and return the values by rank.

    Args:
        function: Function at module level (it is sent by name), which reads its rank from ``torch.distributed``.
        world_size: Number of ranks.
        timeout: Seconds on an idle machine after which the call fails with the stack of every rank; times ``PATIENCE``.
        group_timeout: Timeout of the process group's collectives in seconds; times ``PATIENCE``.
        group: Create the default gloo group before the call; otherwise only the launcher's variables are set.
        env: Variables set during the call, on every rank.
        ordered: Check that the ranks' collectives could not hang on NCCL (``collective_order.py``); a call with False gives the reason.

    Raises:
        RankError: A rank raised, died or hung.
        OrderError: The ranks' collectives could hang on NCCL.
    """
    __tracebackhide__ = True  # pytest: the ranks' tracebacks are enough
    limits = {"timeout": PATIENCE * timeout, "group_timeout": PATIENCE * group_timeout}
    outcomes = observe_ranks(function, world_size, *args, **limits, group=group, env=env, ordered=ordered)
    if not all(outcome.ok for outcome in outcomes):
        raise RankError(getattr(function, "__qualname__", str(function)), outcomes)
    return [outcome.value for outcome in outcomes]


def observe_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float = 90.0,
    group: bool = True,
    env: dict[str, str] | None = None,
    grace: float = GRACE_SECONDS,
    ordered: bool = True,
) -> list[RankOutcome]:
    """Run a call like ``run_ranks``, but return the outcome of each rank instead of raising; limits are not scaled. ``grace``: seconds."""
    __tracebackhide__ = True
    # A process that has loaded the pretend accelerator keeps it, its size and its back end, so each combination has a pool of its own.
    own = {**os.environ, **(env or {})}
    key = (world_size, own.get("HF_ZERO_TEST_DEVICE", "cpu"), own.get("HF_ZERO_TEST_BACKEND", "gloo"), own.get("PRETEND_MEMORY", ""))
    if key[1] == pretend.NAME:
        pretend.build()  # once, rather than in every rank
    pool = _POOLS.get(key)
    if pool is None or not pool.healthy():
        if pool is not None:
            pool.kill()
        pool = _POOLS[key] = RankPool(world_size)
    _close_idle(pool)
    outcomes = pool.call(pickle.dumps((function, args)), timeout=timeout, group_timeout=group_timeout, group=group, env=env, grace=grace)
    if not all(outcome.ok for outcome in outcomes):
        pool.kill()
        del _POOLS[key]
    elif ordered:
        collective_order.check([outcome.record for outcome in outcomes])
    return outcomes


def run_alone(function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> Any:
    """Return ``function(*args)`` from a new process that is no rank, has all imports and ends with the call."""
    with ProcessPoolExecutor(1, _context(), _use_one_thread) as pool:
        return pool.submit(function, *args).result(PATIENCE * timeout)


def warm_up() -> None:
    """Start the server that imports the heavy packages, without waiting for it."""
    from multiprocessing import forkserver

    if _context().get_start_method() == "forkserver":
        forkserver.ensure_running()


def close_pools() -> None:
    """End every rank of every pool."""
    while _POOLS:
        _POOLS.popitem()[1].close()


def _close_idle(called: RankPool) -> None:
    """End pools that other calls have left idle; forking a new one takes less time than their threads do."""
    if _context().get_start_method() != "forkserver":
        return
    for key, pool in list(_POOLS.items()):
        pool.idle = 0 if pool is called else pool.idle + 1
        if pool.idle > IDLE_CALLS:
            _POOLS.pop(key).close()


class RankPool:
    """Processes that wait for jobs, one per rank."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.idle = 0  # calls of other pools since the last one of this
        self._folder = tempfile.TemporaryDirectory(prefix="hf_zero_ranks_")
        self._calls = 0
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            parent_end, child_end = multiprocessing.Pipe()
            process = _context().Process(target=_serve, args=(child_end, rank, world_size, self._folder.name), daemon=True)
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)

    def healthy(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def call(
        self, payload: bytes, *, timeout: float, group_timeout: float, group: bool, env: dict[str, str] | None, grace: float
    ) -> list[RankOutcome]:
        """Send one job to every rank and collect the outcomes, in at most ``timeout`` seconds and a little more."""
        self._calls += 1
        store = os.path.join(self._folder.name, f"store_{self._calls}") if group else None
        job = pickle.dumps(Job(payload, store, _free_port(), group_timeout, env or {}))
        start = time.monotonic()
        for pipe in self._pipes:
            pipe.send_bytes(job)
        outcomes: dict[int, RankOutcome] = {}
        deadline = start + timeout
        while len(outcomes) < self.world_size and time.monotonic() < deadline:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in outcomes}
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting[pipe]
                outcomes[rank] = self._receive(rank, time.monotonic() - start)
                if not outcomes[rank].ok:
                    deadline = min(deadline, time.monotonic() + grace)
        for rank in set(range(self.world_size)) - set(outcomes):
            outcomes[rank] = RankOutcome(rank, "hung", time.monotonic() - start, text=self._stack(rank))
        return [outcomes[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Let idle ranks end by themselves, so that they clean up what libraries registered; then kill the rest."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(3)
        self.kill()

    def kill(self) -> None:
        """End the ranks at once: a rank that hangs in a collective does not respond."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _receive(self, rank: int, seconds: float) -> RankOutcome:
        try:
            status, body = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            return RankOutcome(rank, "died", seconds, text=f"exit code {self._processes[rank].exitcode}\n{self._log(rank)}")
        if status == "ok":
            return RankOutcome(rank, "ok", seconds, value=body[0], record=body[1])
        return RankOutcome(rank, "error", seconds, text=f"{body}\n{self._log(rank)}")

    def _stack(self, rank: int) -> str:
        if not self._processes[rank].is_alive():
            return f"exit code {self._processes[rank].exitcode}\n{self._log(rank)}"
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return f"still running at the time limit:\n{_read(self._folder.name, f'stack_{rank}')}\n{self._log(rank)}"

    def _log(self, rank: int) -> str:
        text = _read(self._folder.name, f"log_{rank}")[-LOG_TAIL_CHARS:]
        return f"output of rank {rank}:\n{text}" if text else ""


def rank() -> int:
    """Return this process's rank in the default group."""
    import torch.distributed as dist

    return dist.get_rank()


def world() -> int:
    """Return the size of the default group."""
    import torch.distributed as dist

    return dist.get_world_size()


def device() -> Any:
    """Return the device of the suite's tensors: ``HF_ZERO_TEST_DEVICE`` (all ranks may share one GPU) or the CPU."""
    import torch

    from tests.pretend import network

    name = os.environ.get("HF_ZERO_TEST_DEVICE", "cpu")
    if name == pretend.NAME:
        pretend.load()
        network.register()
    elif os.environ.get("HF_ZERO_TEST_BACKEND") == network.NAME:
        network.register()
    device = torch.device(name)
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(name, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())


_POOLS: dict[tuple[int, str, str, str], RankPool] = {}  # pools by number of ranks, device, back end and memory of the device
_FACTORIES: dict[str, Any] = {}  # torch's functions that zero.Init may replace temporarily
atexit.register(close_pools)


def _context() -> Any:
    # torchao opens the GPU when it is imported, and no process can use a GPU that was open before its fork.
    if os.path.exists("/dev/nvidiactl") and importlib.util.find_spec("torchao"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(folder: str, name: str) -> str:
    path = Path(folder) / name
    return path.read_text(errors="replace") if path.exists() else ""


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _serve(pipe: connection.Connection, rank: int, world_size: int, folder: str) -> None:
    """Serve jobs as a rank: wait for a job, run it, answer; end when the parent closes the pipe."""
    for name in PRELOAD:
        importlib.import_module(name)
    import torch

    _use_one_thread()
    _share_gloo_thread()
    ended = _keep_ended_groups()
    gc.freeze()  # collections between jobs skip imported modules, which stay
    _FACTORIES.update({name: getattr(torch, name) for name in ("empty", "zeros", "ones", "full", "tensor", "arange")})
    stack = open(os.path.join(folder, f"stack_{rank}"), "w")  # noqa: SIM115 - open as long as the process runs
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    log = os.open(os.path.join(folder, f"log_{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), line_buffering=True)
    imported = len(sys.modules)
    while True:
        if len(sys.modules) > imported:  # imported by the last job, whose garbage is collected
            gc.freeze()
            imported = len(sys.modules)
        try:
            job: Job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        os.ftruncate(log, 0)
        try:
            answer = pickle.dumps(("ok", _run(job, rank, world_size)))
        except BaseException:  # a rank reports any error, SystemExit included
            answer = pickle.dumps(("error", traceback.format_exc()))
        ended.clear()
        pipe.send_bytes(answer)


def _share_gloo_thread() -> None:
    """Make all process groups of this rank use one thread of gloo, of lower priority.

    Each would start its own thread, which wakes a hundred times a second as long as its group is referenced: after some hundred jobs
    these threads take more processor time than the tests. Data that arrive while the rank's main thread has a connection's lock make
    the thread poll without a pause; where processors are few, it would take the one that the main thread needs to free the lock.
    """
    from torch.distributed import ProcessGroupGloo

    threads = Path("/proc/self/task")  # empty where it is not Linux
    others = set(threads.glob("*"))
    construct, device = ProcessGroupGloo.__init__, ProcessGroupGloo.create_default_device()
    for thread in set(threads.glob("*")) - others:
        os.setpriority(os.PRIO_PROCESS, int(thread.name), GLOO_NICENESS)

    def construct_shared(group: Any, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        # TORCH_GLOO_LAZY_INIT connects on use, which needs another kind of gloo device. `others` are options of newer versions of torch.
        if os.environ.get("TORCH_GLOO_LAZY_INIT") or any(others.values()):
            return construct(group, store, rank, size, timeout, **others)
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        return construct(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = construct_shared


def _keep_ended_groups() -> list[Any]:
    """Keep the process groups that a job ends in the list that is returned.

    A script that ends its group before its ``DistributedDataParallel`` leaves the group to DDP's reducer, whose destructor waits, with
    Python's lock, for the group's threads. A thread that frees the last collective's tensors waits for this lock, so the process would
    never end (torch 2.13).
    """
    import torch.distributed as dist

    kept: list[Any] = []
    destroy = dist.destroy_process_group

    def keep_and_destroy(group: Any = None) -> None:
        kept.extend(dist.distributed_c10d._world.pg_map)
        destroy(group)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = keep_and_destroy
    return kept


def _run(job: Job, rank: int, world_size: int) -> tuple[Any, collective_order.Record]:
    import torch
    import torch.distributed as dist

    from hf_zero.comm import comms_log
    from tests.support.collective_log import recording

    values = (rank, rank, world_size, world_size, "127.0.0.1", job.port)
    launcher = {name: str(value) for name, value in zip(LAUNCHER_VARIABLES, values, strict=True)}
    with _environment({**launcher, **job.env}):
        random.seed(0)
        torch.manual_seed(0)
        logging.getLogger("hf_zero").setLevel(logging.INFO)  # Lightning's strategy lowers the level permanently
        # Fills torch.empty with NaN, so that padding or a hole that no code writes shows at once.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            device()  # the pretend accelerator must exist before any code looks for one
            if pretend.loaded():  # reset to the state of a new process
                torch.accelerator.set_device_index(0)
                pretend.reset_counters()
            if job.store is not None:
                store = dist.FileStore(job.store, world_size)
                limit = timedelta(seconds=job.group_timeout)
                backend = os.environ.get("HF_ZERO_TEST_BACKEND", "gloo")
                dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
                # A rank that ends without a collective would close its connections before others have opened theirs. The device is passed
                # for nccl, because hf_zero, not the test, sets the current device.
                dist.barrier(device_ids=[device().index] if backend == "nccl" else None)
            function, args = pickle.loads(job.payload)
            with recording() as record:
                value = function(*args)
            _check_leaks()
            return value, record
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            comms_log.stop_log()  # started by a configuration with comms_logger
            _forget_accelerate()
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _forget_accelerate() -> None:
    """Reset accelerate's states, which belong to the process: the next job's Accelerator would reuse this job's mesh."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


def _check_leaks() -> None:
    """Raise unless a job has left the process unchanged, because the next job runs in the same process."""
    import torch

    if torch.get_default_dtype() != torch.float32:
        raise AssertionError(f"the job left the default dtype at {torch.get_default_dtype()}, expected torch.float32")
    if not torch.is_grad_enabled():
        raise AssertionError("the job left autograd switched off")
    if pretend.loaded():
        torch.accelerator.synchronize()
        if complaints := pretend.complaints():
            raise AssertionError("the pretend accelerator complains:\n" + "\n".join(complaints))
    replaced = [name for name, original in _FACTORIES.items() if getattr(torch, name) is not original]
    if replaced:
        raise AssertionError(f"the job left these functions of torch replaced: {replaced}")
