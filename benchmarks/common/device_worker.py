"""One rank of a contender of the benchmarks on devices, also with a peer's Python: train, print one JSON line.

Imports its packages, waits for a line on standard input, and only then uses the device, so that a contender starts while the one before
still trains. The contender ``rates`` measures the machine instead: copies in both directions, Adam, forward and backward alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.contenders import CONTENDERS, DTYPES, PACKAGES, Job, Step
from benchmarks.common.training import build_model, make_batch

CLOSE = 0.97  # of the memory that a search for the largest batch fills
NEAR = 1.25  # the largest batch to the largest that the search has tried before

# ------------------------------------------------------------------------------------------------ measuring


def synchronize(job: Job) -> None:
    if job.device != "cpu":
        torch.accelerator.synchronize()


def seconds_of(job: Job, work: Callable[[], object], times: int) -> float:
    """Return the median seconds of ``times`` runs, after one that does not count."""
    work()
    found = []
    for _ in range(times):
        synchronize(job)
        start = time.perf_counter()
        work()
        synchronize(job)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def rates(job: Job) -> dict[str, float]:
    """Return the rates that bound a step: bytes per second of copies and of host memory, seconds of forward and backward alone."""
    numel = (256 << 20) if job.device == "cuda" else (8 << 20)
    host = torch.zeros(numel, dtype=torch.uint8, pin_memory=job.device != "cpu")
    device = torch.zeros(numel, dtype=torch.uint8, device=job.device)
    inward = numel / seconds_of(job, lambda: device.copy_(host, non_blocking=True), 5)
    outward = numel / seconds_of(job, lambda: host.copy_(device, non_blocking=True), 5)
    values = torch.zeros((512 if job.device == "cuda" else 4) << 20)  # several times the size of a server's third-level cache
    addition = 8 * values.numel() / seconds_of(job, lambda: values.add_(1.0), 5)
    with torch.device(job.device):
        model = build_model(job.shape, job.size).to(DTYPES[job.dtype]).train()
    batch = _on_device(job, make_batch(0, 0, job.size))

    def compute() -> None:
        model(**batch).loss.backward()
        for param in model.parameters():
            param.grad = None

    params = sum(param.numel() for param in model.parameters())
    return {"inward": inward, "outward": outward, "host": addition, "compute": seconds_of(job, compute, job.steps), "params": params}


def _on_device(job: Job, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(job.device) for name, value in batch.items()}


def peaks(job: Job) -> dict[str, float]:
    """Return the peaks in bytes: of torch's allocations on the GPU, and of this process in host memory."""
    gpu = torch.get_device_module(job.device).max_memory_allocated() if job.device != "cpu" else 0
    return {"gpu": gpu, "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


@contextlib.contextmanager
def traced(job: Job) -> Iterator[None]:
    """Profile all threads inside the context, and write a Chrome trace."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if job.device == "cuda" else [])
    try:
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:  # other torch versions: the update thread is missing in the trace
        threads = None
    with profile(activities=kinds, experimental_config=threads) as recorded:
        yield
    recorded.export_chrome_trace(job.trace)


def searched(peak: Callable[[int], int], agreed: Callable[[int], int], first: int, limit: float, most: int = 0) -> int:
    """Return the largest batch whose peak is within a limit, by the line through the peaks of the last two that were tried.

    Peaks of the smallest batches can be those of the update, which do not grow, so the last one tried is near the answer.

    Args:
        peak: Trains a step with a batch, and returns its peak in bytes.
        agreed: Returns the least of the ranks' numbers, because all ranks must do the same steps.
        first: The smallest batch that is tried.
        limit: Bytes.
        most: A batch that is not exceeded, and then none between is tried; 0 for none.
    """
    known = [(batch, peak(batch)) for batch in (first, 2 * first)]
    while True:
        (small, low), (large, high) = known[-2:]
        fits = agreed(max(1, int(large + (limit - high) * (large - small) / max(1, high - low))))
        if most or fits <= NEAR * large:
            return min(fits, most or fits)
        between = min((fits + large) // 2, 4 * large)
        known.append((between, peak(between)))


def largest_batch(job: Job, step: Step) -> int:
    """Return the largest batch that fits ``job.cap_gib``, from steps with smaller ones."""
    memory = torch.get_device_module(job.device)
    steps = 0

    def peak(batch: int) -> int:
        nonlocal steps
        for _ in range(1 if steps else 2):  # the optimizer creates its states in the first step
            memory.reset_peak_memory_stats()
            step(_on_device(job, make_batch(steps, torch.distributed.get_rank(), {**job.size, "batch": batch})))
            steps += 1
        return int(memory.max_memory_allocated())

    def agreed(batch: int) -> int:
        least = torch.tensor(batch)
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
        return int(least)

    return searched(peak, agreed, job.size["batch"], CLOSE * job.cap_gib * 2**30, job.most)


def train(job: Job) -> dict[str, Any]:
    """Time steps of one contender."""
    step = CONTENDERS[job.contender](job)
    if job.search:
        job = replace(job, size={**job.size, "batch": largest_batch(job, step)})
        print(f"tries a batch of {job.size['batch']}", file=sys.stderr, flush=True)
    if job.device != "cpu":
        torch.get_device_module(job.device).empty_cache()
        torch.get_device_module(job.device).reset_peak_memory_stats()  # some contenders draw initial values on the device
    rank = torch.distributed.get_rank()
    batches = [_on_device(job, make_batch(index, rank, job.size)) for index in range(job.warmup + job.steps + 2)]
    loss = torch.zeros(())
    begin = time.perf_counter()
    first = 0.0
    for batch in batches[: job.warmup]:
        loss = step(batch)
        synchronize(job)
        first = first or time.perf_counter() - begin
    found = []
    timed = batches[job.warmup : job.warmup + job.steps]
    for part in [timed[first : first + job.together] for first in range(0, len(timed), job.together)]:
        synchronize(job)
        start = time.perf_counter()
        for batch in part:
            loss = step(batch)
        synchronize(job)
        found.append((time.perf_counter() - start) / len(part))
    answer = {"seconds": statistics.median(found), "first": first, "loss": float(loss), "batch": job.size["batch"], **peaks(job)}
    if job.trace:
        try:
            with traced(job):  # two steps, because an update may continue into the next forward
                for batch in batches[-2:]:
                    step(batch)
                synchronize(job)
        except Exception:  # the measurements are complete
            traceback.print_exc()
    return answer


def watch_host(limit_gib: float) -> None:
    """End the process when it has more host memory than allowed."""

    def watch() -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while int(Path("/proc/self/statm").read_text().split()[1]) * page < limit_gib * 2**30:
            time.sleep(0.2)
        print(f"out of host memory: more than {limit_gib:g} GiB", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def load(job: Job) -> None:
    """Import every package of the job."""
    import transformers

    for name in ("GPT2LMHeadModel", "LlamaForCausalLM"):
        getattr(transformers, name)
    packages = {
        job.contender: job.contender in PACKAGES,
        "peft": job.lora,
        "torchao.float8": job.float8,
        "liger_kernel.transformers": job.liger,
        "torch._inductor.compile_fx": job.compiled,
    }
    for package in (name for name, wanted in packages.items() if wanted):
        importlib.import_module(package)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=lambda text: Job(**json.loads(text)), help="JSON: the fields of Job")
    job = parser.parse_args().job
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to standard output
    own = {"cuda": "nccl"}.get(job.device, "gloo")
    if job.device == "pretend":
        from tests import pretend
        from tests.pretend import network

        pretend.load()
        network.register()
        own = network.NAME
    load(job)
    if not sys.stdin.readline():
        raise SystemExit("the benchmark has ended")
    if job.host_gib:
        watch_host(job.host_gib)
    if job.device != "cpu":
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())  # ranks may share a device
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        if job.cap_gib and job.device == "cuda":
            torch.cuda.set_per_process_memory_fraction(min(1.0, job.cap_gib * 2**30 / torch.cuda.mem_get_info()[1]))
    if job.contender == "rates":
        answers.write(json.dumps(rates(job)) + "\n")
        return
    # FSDP2 sums the norms of offloaded gradients on the host, which needs a host back end.
    shared = job.device == "cuda" and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count()
    torch.distributed.init_process_group("gloo" if shared or job.device == "cpu" else f"cpu:gloo,{job.device}:{own}")
    answers.write(json.dumps(train(job)) + "\n")
    answers.flush()
    sys.stderr.flush()
    os._exit(0)  # a peer's clean-up must not turn a result into a failure


if __name__ == "__main__":
    main()
