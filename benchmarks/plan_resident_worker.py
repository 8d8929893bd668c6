"""One rank of ``plan_resident.py``: trains two optimizer steps of what it is asked for, and tells how much memory it had."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import open_answers

from tests.support.memory import resident_bytes, return_freed
from tests.support.planned import engine_of

_FORGET_THE_PEAK = "5"  # what the kernel takes in clear_refs for: VmHWM begins anew (proc(5))


def peak_of(case: dict[str, Any]) -> int:
    """The most memory, in bytes, that this process has in the second step."""
    samples, length = case["samples"], case.pop("length")
    built, engine = engine_of(**case, device=torch.device("cpu"))
    for _ in range(2):
        gc.collect()
        Path("/proc/self/clear_refs").write_text(_FORGET_THE_PEAK)
        loss = engine(**built.batch(samples, length)).loss
        engine.backward(loss)
        del loss
        engine.step()
    peak = resident_bytes("VmHWM")
    engine.destroy()
    return peak


def main() -> None:
    """Answers requests."""
    answers = open_answers()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        peak_of(request["warm_up"])
        return_freed()
        before = resident_bytes("VmRSS")
        answers.write(json.dumps({"before": before, "peak": peak_of(request["case"])}) + "\n")


if __name__ == "__main__":
    main()
