"""One rank of ``plan_resident.py``: train two optimizer steps of a requested case, and report the memory of the process."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.processes import serve_ranks
from tests.support.memory import Peak, in_use_bytes, resident_bytes, return_freed
from tests.support.planned import engine_of

_FORGET_THE_PEAK = "5"  # value for clear_refs that resets VmHWM (proc(5))


def peaks_of(case: dict[str, Any]) -> tuple[int, int]:
    """Return the peaks in the second step, in bytes: of this process's resident memory, and of its heap in use."""
    samples, length = case["samples"], case.pop("length")
    built, engine = engine_of(**case, device=torch.device("cpu"))
    used = Peak(in_use_bytes)
    for _ in range(2):
        gc.collect()
        Path("/proc/self/clear_refs").write_text(_FORGET_THE_PEAK)
        used.restart()
        loss = engine(**built.batch(samples, length)).loss
        engine.backward(loss)
        del loss
        engine.step()
    resident = resident_bytes("VmHWM")
    used.close()
    engine.destroy()
    return resident, used.value


def added(request: dict[str, Any]) -> dict[str, Any]:
    """Return by how much the case of a request grows the memory of this process, which has trained a warm-up."""
    peaks_of(request["warm_up"])
    return_freed()
    before = resident_bytes("VmRSS"), in_use_bytes()
    resident, used = peaks_of(request["case"])
    return {"resident": resident - before[0], "used": used - before[1]}


if __name__ == "__main__":
    serve_ranks(added)
