"""One rank of one contender of ``two_nodes.py``, started in a node's network namespace, also with the Python of a peer's venv.

Needs only torch, transformers and the contender's package. ``{"steps": K}`` runs K training steps; the answer has seconds per step, the
bytes that this node put on the link per step, and the last loss.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from processes import open_answers
from slow_network import sent_bytes
from torch import nn
from worker import ADAMW, Step, build_model, engine_loop, make_batch, plain_loop

BF16 = torch.bfloat16


def ddp(model: nn.Module) -> Step:
    """fp32 masters, computation in bf16, gradients that travel in bf16: what a bf16 run of an engine sends."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, bf16_compress_hook)
    plain = plain_loop(wrapped)

    def step(batch: Any) -> float:
        with torch.autocast("cpu", BF16):
            return plain(batch)

    return step


def fsdp2(model: nn.Module, nodes: int) -> Step:
    """``fully_shard`` over all ranks, or over the ranks of each of ``nodes`` nodes (HSDP); bf16, resharded after forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (nodes, world // nodes), mesh_dim_names=("replicate", "shard")) if nodes > 1 else None
    rest: dict[str, Any] = {"mesh": mesh or init_device_mesh("cpu", (world,)), "mp_policy": MixedPrecisionPolicy(BF16, BF16)}
    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block, reshard_after_forward=True, **rest)  # type: ignore[arg-type]
    fully_shard(model, reshard_after_forward=True, **rest)
    return plain_loop(model)


def engine(package: str, zero: dict[str, Any], size: dict[str, int]) -> Step:
    """The loop of ``hf_zero`` or ``deepspeed``: one configuration for both, its own AdamW over fp32 masters."""
    module = __import__(package)
    params = {key: value for key, value in ADAMW.items() if key != "fused"}
    config = {
        "train_micro_batch_size_per_gpu": size["batch"],
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    if package == "hf_zero":
        config["optimizer"] = {"type": "AdamW", "params": params}
        return engine_loop(module.initialize(model=build_model("gpt2", size).train(), config=config)[0])
    if zero.get("mics_shard_size"):
        with module.zero.MiCS_Init(config_dict_or_path=config):
            model = build_model("gpt2", size)
    else:
        model = build_model("gpt2", size)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return engine_loop(
        module.initialize(model=model.train(), optimizer=optimizer, model_parameters=list(model.parameters()), config=config)[0]
    )


def build_step(kind: str, zero: dict[str, Any], size: dict[str, int]) -> Step:
    """The training step of a contender: ``ddp``, ``fsdp2``, ``fsdp2-nodes``, ``hf_zero`` or ``deepspeed``."""
    if kind == "ddp":
        return ddp(build_model("gpt2", size).train())
    if kind.startswith("fsdp2"):
        return fsdp2(build_model("gpt2", size).train(), 2 if kind.endswith("nodes") else 1)
    return engine(kind, zero, size)


def serve(step: Step, size: dict[str, int], answers: Any) -> None:
    """Runs steps on request until standard input ends."""
    answers.write(json.dumps({"ready": True}) + "\n")
    done = 0
    for line in sys.stdin:
        count = json.loads(line)["steps"]
        batches = [make_batch(done + index, dist.get_rank(), size) for index in range(count)]
        dist.barrier()
        before, start = sent_bytes(), time.perf_counter()
        losses = [step(batch) for batch in batches]
        seconds = (time.perf_counter() - start) / count
        dist.barrier()
        done += count
        answer = {"seconds": seconds, "bytes": (sent_bytes() - before) / count, "loss": losses[-1]}
        answers.write(json.dumps(answer) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("zero", type=json.loads, help="JSON: the zero_optimization section")
    parser.add_argument("size", type=json.loads, help="JSON: layers, width, heads, vocab, length, batch")
    arguments = parser.parse_args()
    answers = open_answers()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    serve(build_step(arguments.kind, arguments.zero, arguments.size), arguments.size, answers)


if __name__ == "__main__":
    main()
