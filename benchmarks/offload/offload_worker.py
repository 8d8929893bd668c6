"""One rank of one contender of the offload benchmark. Started by ``offload.py``, also with the Python of a peer's venv.

It reads one JSON object per line from standard input and answers one per line: ``{"steps": K}`` runs K training steps and returns the
seconds per step, their processor seconds, the seconds in ``step()``, the last loss and the process's resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.training import build_model, make_batch

TOP_LEVEL = ("gradient_clipping", "hf_zero")


def resident() -> dict[str, int]:
    """Return the bytes of this process in memory: its own (anonymous) and those of files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: int(fields[key].split()[0]) * 1024 for name, key in (("anonymous", "RssAnon"), ("file", "RssFile"))}


def build_engine(package: str, blocks: dict[str, Any], stage: int, size: dict[str, int]) -> Any:
    """Return an engine of ``hf_zero`` or ``deepspeed``: AdamW, bf16."""
    module = __import__(package)
    config = {
        "train_micro_batch_size_per_gpu": size["batch"],
        "gradient_clipping": 1e6,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, **{key: value for key, value in blocks.items() if key not in TOP_LEVEL}},
        **{key: value for key, value in blocks.items() if key in TOP_LEVEL},
    }
    model = build_model("gpt2", size).train()
    client = None
    if not blocks:  # without offload both use torch's AdamW; with offload DeepSpeed has its own class
        values = config.pop("optimizer")["params"]
        config["zero_allow_untested_optimizer"] = True
        client = torch.optim.AdamW(model.parameters(), fused=True, **values)
    return module.initialize(model=model, optimizer=client, model_parameters=list(model.parameters()), config=config)[0]


def serve(engine: Any, size: dict[str, int], answers: Any) -> None:
    """Run steps on request until standard input ends."""
    answers.write(json.dumps({"ready": True}) + "\n")
    done = 0
    for line in sys.stdin:
        count = json.loads(line)["steps"]
        batches = [make_batch(done + index, dist.get_rank(), size) for index in range(count)]
        dist.barrier()
        start, cpu, stepping = time.perf_counter(), time.process_time(), 0.0
        for batch in batches:
            loss = engine(**batch).loss
            engine.backward(loss)
            begin = time.perf_counter()
            engine.step()
            stepping += time.perf_counter() - begin
        seconds = (time.perf_counter() - start) / count
        cpu = (time.process_time() - cpu) / count
        done += count
        del batch, batches
        times = {"seconds": seconds, "cpu": cpu, "stepping": stepping / count}
        answers.write(json.dumps({**times, "loss": float(loss), **resident()}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", choices=["hf_zero", "deepspeed"])
    parser.add_argument("stage", type=int)
    parser.add_argument("blocks", type=json.loads, help="JSON: keys of zero_optimization, and those of TOP_LEVEL")
    parser.add_argument("size", type=json.loads, help="JSON: layers, width, heads, vocab, length, batch")
    arguments = parser.parse_args()
    # Libraries print to standard output, so the answers need a channel of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    serve(build_engine(arguments.package, arguments.blocks, arguments.stage, arguments.size), arguments.size, answers)


if __name__ == "__main__":
    main()
