"""One rank of a contender of ``offload_gpu.py`` and ``step_time_gpu.py``, also with a peer's Python: train, print one JSON line.

Needs only torch, transformers and the contender's package. The contender ``rates`` measures the machine instead: copies in both
directions, Adam, forward and backward alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.training import build_model, make_batch

LR, WEIGHT_DECAY = 1e-4, 0.1
SCALE = 128.0  # static loss scale of fp16, so that every contender does the same steps
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Step = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Job:
    """Settings of a run, from the command line.

    Attributes:
        contender: A key of ``CONTENDERS``, or ``rates``.
        device: ``cuda``, ``cpu``, or ``pretend`` for the tests' pretend accelerator.
        dtype: ``bf16`` or ``fp16``.
        size: layers, width, heads, vocab, length, batch.
        shape: ``gpt2`` or ``llama``.
        stage: ZeRO stage of hf_zero and DeepSpeed.
        offload: Keep parameters and optimizer on the host; without it, torch's fused AdamW is the client's optimizer everywhere.
        reshard: FSDP2 drops whole parameters after forward.
        cap_gib: GPU memory that torch may allocate; 0 for all.
        host_gib: Resident host memory at which the process ends itself; 0 for no limit.
        steps: Number of timed steps.
        together: Number of steps between two waits for the device, one reading; the host may run ahead in between.
        warmup: Number of steps before the timed ones.
        overlap: ``hf_zero.offload_overlap``.
        trace: Path for one step's profile; empty for none.
    """

    contender: str
    device: str
    dtype: str
    size: dict[str, int]
    shape: str = "gpt2"
    stage: int = 3
    offload: bool = True
    reshard: bool = True
    cap_gib: float = 0.0
    host_gib: float = 0.0
    steps: int = 5
    together: int = 1
    warmup: int = 2
    overlap: str = "auto"
    trace: str = ""


# ------------------------------------------------------------------------------------------------ contenders


def _config(job: Job) -> dict[str, Any]:
    section: dict[str, Any] = {"enabled": True}
    if job.dtype == "fp16":
        section["loss_scale"] = SCALE
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.size["batch"],
        "gradient_clipping": 1.0,
        job.dtype: section,
        "zero_optimization": {"stage": job.stage},
    }
    if job.offload:
        blocks = {name: {"device": "cpu", "pin_memory": job.device != "cpu"} for name in ("offload_optimizer", "offload_param")}
        config["zero_optimization"] |= blocks
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}}
    else:
        config["zero_allow_untested_optimizer"] = True
    return config


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def _engine_step(engine: Any) -> Step:
    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _initialize(package: Any, job: Job, model: nn.Module, config: dict[str, Any]) -> Step:
    """Return the step of an engine with DeepSpeed's interface."""
    own = {} if job.offload else {"optimizer": _adamw(model)}
    return _engine_step(package.initialize(model=model, model_parameters=list(model.parameters()), config=config, **own)[0])


def hf_zero(job: Job) -> Step:
    """Return the step of hf_zero; at stage 3 the model is built in shards."""
    import hf_zero

    config = {**_config(job), "hf_zero": {"offload_overlap": job.overlap}}
    init = hf_zero.zero.Init(config_dict_or_path=config) if job.stage == 3 else torch.device(job.device)
    with init:
        model = build_model(job.shape, job.size)
    return _initialize(hf_zero, job, model.train(), config)


def deepspeed(job: Job) -> Step:
    """Return DeepSpeed's step; with offload the model is built in host memory, because its ``zero.Init`` fails with some torch versions."""
    import deepspeed

    with torch.device("cpu" if job.offload else job.device):
        model = build_model(job.shape, job.size).to(DTYPES[job.dtype]).train()
    return _initialize(deepspeed, job, model, _config(job))


def _loop(job: Job, model: nn.Module, autocast: bool) -> Step:
    optimizer = _adamw(model)
    scale = SCALE if job.dtype == "fp16" else 1.0

    def step(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(job.device, dtype=DTYPES[job.dtype]) if autocast else contextlib.nullcontext():
            loss: Tensor = model(**batch).loss
        (loss * scale).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        if scale != 1.0:
            for grad in grads:
                grad.mul_(1.0 / scale)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2(job: Job) -> Step:
    """Return the step of ``fully_shard``; with offload ``CPUOffloadPolicy``, except on a CPU, where there is nothing to offload from."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    offload = job.offload and job.device != "cpu"
    with torch.device("cpu" if offload else job.device):
        model: Any = build_model(job.shape, job.size).train()
    options = {
        "mesh": init_device_mesh(job.device, (torch.distributed.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[job.dtype], reduce_dtype=DTYPES[job.dtype]),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        "reshard_after_forward": job.reshard,
    }
    for block in model.transformer.h if job.shape == "gpt2" else model.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _loop(job, model, autocast=False)


def _on_its_device(job: Job) -> nn.Module:
    with torch.device(job.device):
        return build_model(job.shape, job.size).train()


def pytorch(job: Job) -> Step:
    """Return the step of plain PyTorch: fp32 parameters on the device, autocast, torch's fused AdamW."""
    return _loop(job, _on_its_device(job), autocast=True)


def ddp(job: Job) -> Step:
    """Return the step of plain PyTorch in DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    return _loop(job, DistributedDataParallel(_on_its_device(job), gradient_as_bucket_view=True), autocast=True)


CONTENDERS: dict[str, Callable[[Job], Step]] = {"hf_zero": hf_zero, "deepspeed": deepspeed, "fsdp2": fsdp2, "pytorch": pytorch, "ddp": ddp}


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
    model = build_model(job.shape, job.size).to(DTYPES[job.dtype]).to(job.device).train()
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


def train(job: Job) -> dict[str, Any]:
    """Time steps of one contender."""
    step = CONTENDERS[job.contender](job)
    rank = torch.distributed.get_rank()
    batches = [_on_device(job, make_batch(index, rank, job.size)) for index in range(job.warmup + job.steps + 2)]
    loss = torch.zeros(())
    for batch in batches[: job.warmup]:
        loss = step(batch)
    found = []
    timed = batches[job.warmup : job.warmup + job.steps]
    for part in [timed[first : first + job.together] for first in range(0, len(timed), job.together)]:
        synchronize(job)
        start = time.perf_counter()
        for batch in part:
            loss = step(batch)
        synchronize(job)
        found.append((time.perf_counter() - start) / len(part))
    answer = {"seconds": statistics.median(found), "loss": float(loss), **peaks(job)}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=lambda text: Job(**json.loads(text)), help="JSON: the fields of Job")
    job = parser.parse_args().job
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to standard output
    if job.host_gib:
        watch_host(job.host_gib)
    if job.device == "pretend":
        from tests import pretend

        pretend.load()
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if job.cap_gib:
            torch.cuda.set_per_process_memory_fraction(min(1.0, job.cap_gib * 2**30 / torch.cuda.mem_get_info()[1]))
    if job.contender == "rates":
        answers.write(json.dumps(rates(job)) + "\n")
        return
    # FSDP2 sums the norms of offloaded gradients on the host, which needs a host back end.
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo")
    answers.write(json.dumps(train(job)) + "\n")
    answers.flush()
    sys.stderr.flush()
    os._exit(0)  # a peer's clean-up must not turn a result into a failure


if __name__ == "__main__":
    main()
