"""Facts and rates of this machine: driver, versions, nccl, native library, memory, copies, matrix products.

python -m benchmarks.gpu.facts
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import flops
from benchmarks.common.processes import REPOSITORY
from benchmarks.common.tables import ResultTable

SMI = [
    "nvidia-smi",
    "--query-gpu=driver_version,name,memory.total,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm",
    "--format=csv,noheader",
]
TOOLS = ("nvcc", "c++", "cmake", "ninja", "git")
Fact = tuple[str, str]


def native() -> str:
    """Return whether the native library is used, and if not, why and how to build it."""
    from hf_zero.native.library import status

    found = status()
    if found.isa:
        return str(found)
    spec = importlib.util.spec_from_file_location("native_library", REPOSITORY / "packaging" / "native_library.py")
    assert spec is not None and spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    lacking = [what for what, there in (("C++ compiler", builder.compiler()), ("cmake", shutil.which("cmake"))) if not there]
    return (
        f"cannot be built, no {' and no '.join(lacking)}: the torch reference serves"
        if lacking
        else "not built yet: the part kernels builds it"
    )


def versions() -> Iterator[Fact]:
    from hf_zero.environment import environment_facts

    for group, entries in environment_facts().items():
        for name, value in entries.items():
            yield (name if group in ("libraries", "variables", "devices") else f"{group}: {name}"), value


def driver() -> Iterator[Fact]:
    """Yield the facts that NVIDIA's tool reports, if it is installed."""
    if shutil.which(SMI[0]):
        done = subprocess.run(SMI, capture_output=True, text=True, timeout=30)
        for index, line in enumerate((done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()):
            yield f"driver, name, memory, PCIe generation and width, clock of GPU {index}", line
    yield "tools", ", ".join(name for name in TOOLS if shutil.which(name)) or "none"


def seconds_of(work: Callable[[], object], synchronize: Callable[[], None], times: int = 7) -> float:
    """Return the median seconds of ``times`` runs, after two that do not count."""
    found = []
    for index in range(times + 2):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        if index >= 2:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def rates(device: str) -> Iterator[Fact]:
    """Yield rates in bytes and FLOPs per second."""
    import torch

    on_host = device == "cpu"
    synchronize: Callable[[], None] = (lambda: None) if on_host else torch.accelerator.synchronize
    numel = (256 << 20) if device == "cuda" else (4 << 20)
    host = torch.zeros(numel, dtype=torch.uint8, pin_memory=not on_host)
    here, there = (torch.zeros(numel, dtype=torch.uint8, device=device) for _ in range(2))
    copies: dict[str, tuple[Any, Any, int]] = {"to the device": (here, host, 1), "from the device": (host, here, 1)}
    copies["on the device, read and written"] = (there, here, 2)
    for name, (into, source, passes) in copies.items():
        seconds = seconds_of(lambda into=into, source=source: into.copy_(source, non_blocking=True), synchronize)
        yield f"copy {name}", f"{passes * numel / seconds / 1e9:.1f} GB/s"
    values = torch.zeros(numel // 4 if on_host else 512 << 20)  # several times the size of a third-level cache
    yield "addition in host memory", f"{8 * values.numel() / seconds_of(lambda: values.add_(1.0), lambda: None) / 1e9:.1f} GB/s"
    side = 8192 if device == "cuda" else 256
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    rate = 2 * side**3 / seconds_of(lambda: left @ right, synchronize)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    peak = flops.peak_of(name)
    yield (
        f"bf16 matrix product of {side}",
        f"{rate / 1e12:.2f} TFLOP/s" + (f", {100 * rate / peak:.0f} % of {peak / 1e12:.0f}" if peak else ""),
    )


def nccl(device: str) -> Iterator[Fact]:
    """Yield nccl's version, and the rate at which one rank gathers from itself."""
    if device != "cuda":
        return
    import torch
    import torch.distributed as dist

    yield "nccl", ".".join(map(str, torch.cuda.nccl.version()))
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    numel = 64 << 20
    parts, full = torch.ones(numel, device=device), torch.empty(numel, device=device)
    seconds = seconds_of(lambda: dist.all_gather_into_tensor(full, parts), torch.accelerator.synchronize)
    yield "all-gather of one rank on nccl", f"{4 * numel / seconds / 1e9:.0f} GB/s"
    dist.destroy_process_group()


def collect(device: str) -> Iterator[Fact]:
    """Yield the facts about this machine and its software, first the ones that need no measurement."""
    yield "native library", native()
    yield from driver()
    yield "processors", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} for this process"
    yield from versions()
    yield from rates(device)
    yield from nccl(device)


def table_of(facts: list[Fact]) -> ResultTable:
    return ResultTable(
        title="Facts",
        command="python -m benchmarks.gpu.facts",
        text="What the numbers depend on.",
        columns=["what", "value"],
        rows=[list(fact) for fact in facts],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu", "pretend"], default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "pretend":
        from tests import pretend

        pretend.load()
    facts: list[Fact] = []
    for name, value in collect(arguments.device):
        print(f"{name}: {value}", flush=True)
        facts.append((name, value))
        if arguments.json:  # results are kept even if a later measurement fails
            table_of(facts).save(arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
