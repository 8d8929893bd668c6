"""One rank of one contender of the step-time benchmark. Started by ``step_time.py``, also with the Python of a peer's venv.

It reads one JSON object per line from standard input and answers one per line: ``{"steps": K}`` runs K training steps and returns the
seconds per step, the last loss and the process's peak memory. Needs only torch, transformers and the contender's package.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.processes import open_answers
from benchmarks.common.training import ADAMW, Step, build_model, engine_loop, make_batch, plain_loop


def ddp(model: nn.Module) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    return plain_loop(DistributedDataParallel(model, gradient_as_bucket_view=True))


def fsdp2(model: nn.Module, reshard_after_forward: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return plain_loop(model)


def zero(package: str, model: nn.Module, stage: int, batch: int) -> Step:
    """Return the DeepSpeed-style loop of ``hf_zero`` or ``deepspeed``: one configuration, one client optimizer for both."""
    module = __import__(package)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
    }
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine = module.initialize(model=model, optimizer=optimizer, model_parameters=list(model.parameters()), config=config)[0]
    return engine_loop(engine)


def build_step(contender: str, model: nn.Module, batch: int) -> Step:
    """Return the training step of a contender: ``bare``, ``ddp``, ``fsdp2[-reshard]``, ``hf_zero-N`` or ``deepspeed-N``."""
    if contender == "bare":
        return plain_loop(model)
    if contender == "ddp":
        return ddp(model)
    if contender.startswith("fsdp2"):
        return fsdp2(model, reshard_after_forward=contender.endswith("reshard"))
    package, stage = contender.split("-")
    return zero(package, model, int(stage), batch)


def serve(contender: str, shape: str, size: dict[str, int], answers: Any) -> None:
    """Build the contender, then run steps on request until standard input ends."""
    model = build_model(shape, size)
    step = build_step(contender, model.train(), size["batch"])
    answers.write(json.dumps({"ready": True}) + "\n")
    done = 0
    for line in sys.stdin:
        count = json.loads(line)["steps"]
        batches = [make_batch(done + index, dist.get_rank(), size) for index in range(count)]
        dist.barrier()
        start = time.perf_counter()
        losses = [step(batch) for batch in batches]
        seconds = (time.perf_counter() - start) / count
        done += count
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform != "darwin" else 1)
        answers.write(json.dumps({"seconds": seconds, "loss": losses[-1], "peak_bytes": peak}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender")
    parser.add_argument("shape", choices=["gpt2", "llama"])
    parser.add_argument("size", type=json.loads, help="JSON: layers, width, heads, vocab, length, batch")
    arguments = parser.parse_args()
    answers = open_answers()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    serve(arguments.contender, arguments.shape, arguments.size, answers)


if __name__ == "__main__":
    main()
