"""One rank of one contender of the tensor-parallel benchmark. Started by ``tensor_parallel.py``, also with the Python of a peer's venv.

It reads one JSON object per line from standard input and answers one per line: ``{"steps": K}`` runs K training steps and returns the
seconds per step and the last loss. With the package ``account``, ``{"tp": T, "stage": S}`` returns the bytes that a step of hf_zero sends
and that this rank holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.peak_memory import peak_of
from benchmarks.common.processes import open_answers
from benchmarks.common.training import ADAMW, Step, build_model, engine_loop, make_batch


def config_of(tp: int, stage: int, batch: int, bf16: bool) -> dict[str, Any]:
    """Return one configuration for ``hf_zero`` and ``deepspeed``."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "tensor_parallel": {"autotp_size": tp},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
    }


def engine_of(package: str, model: nn.Module, config: dict[str, Any]) -> Any:
    """Return an engine of ``hf_zero`` or ``deepspeed`` over a model that ``tp_model_init`` has split, like Trainer."""
    module = __import__(package)
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    if package == "hf_zero":
        from hf_zero.tensor_parallel.split import tp_model_init
    else:
        tp_model_init = module.tp_model_init
    model = tp_model_init(model=model, tp_size=config["tensor_parallel"]["autotp_size"], dtype=dtype, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return module.initialize(model=model, optimizer=optimizer, model_parameters=list(model.parameters()), config=config)[0]


def dtensor(model: nn.Module, shape: str, tp: int, stage: int) -> Step:
    """Return the step of torch's ``parallelize_module`` with hf_zero's plan for a Llama; with DDP's sums (stage 0) or FSDP2 over
    replicas.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if shape != "llama":
        raise SystemExit("parallelize_module splits nn.Linear and nn.Embedding; GPT-2's layers are Conv1D")
    copies = dist.get_world_size() // tp
    mesh = init_device_mesh("cpu", (copies, tp), mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    column, row = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.o_proj", "mlp.down_proj"),
    )
    plan |= {f"model.layers.*.{name}": ColwiseParallel() for name in column}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in row}
    parallelize_module(model, mesh["tp"], plan)
    if copies > 1:
        from torch.distributed.fsdp import fully_shard

        for block in (*model.model.layers, model):
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=stage == 3)
    kinds = [[param for param in model.parameters() if isinstance(param, DTensor) is split] for split in (True, False)]
    optimizer = torch.optim.AdamW([{"params": params} for params in kinds if params], **ADAMW)

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def account(tp: int, stage: int, shape: str, size: dict[str, int]) -> dict[str, int]:
    """Return the bytes that the second step of hf_zero in bf16 sends over each axis, and that this rank holds after it and at its peak."""
    from hf_zero.comm.collectives import Collectives
    from tests.support.memory import live_bytes

    elsewhere = live_bytes()
    engine = engine_of("hf_zero", build_model(shape, size).train(), config_of(tp, stage, size["batch"], bf16=True))
    step = engine_loop(engine)
    step(make_batch(0, dist.get_rank() // tp, size))  # creates the moments and learns the order of blocks
    batch = make_batch(1, dist.get_rank() // tp, size)
    axis = engine.collectives.topology.model
    networks = [one for one in gc.get_objects() if isinstance(one, Collectives)]
    over_model = [one for one in networks if axis is not None and one.topology.group is axis.group]
    over_data = [one for one in networks if one not in over_model]
    held = live_bytes() - elsewhere
    before = [sum(one.sent_bytes for one in axis) for axis in (over_data, over_model)]
    growth = peak_of(lambda: step(batch))
    sent = [sum(one.sent_bytes for one in axis) - start for axis, start in zip((over_data, over_model), before, strict=True)]
    layouts = [unit.layout for unit in engine.units]
    engine.destroy()
    return {
        "data_bytes": sent[0],
        "model_bytes": sent[1],
        "held_bytes": held,
        "peak_bytes": held + growth,
        "numel": sum(layout.numel for layout in layouts),
        "padding": sum(layout.padded_numel - layout.numel for layout in layouts),
    }


def serve(contender: dict[str, Any], shape: str, size: dict[str, int], answers: Any) -> None:
    """Build the contender, then run steps on request until standard input ends."""
    tp, stage = contender["tp"], contender["stage"]
    model = build_model(shape, size).train()
    if contender["package"] == "dtensor":
        step = dtensor(model, shape, tp, stage)
    else:
        step = engine_loop(engine_of(contender["package"], model, config_of(tp, stage, size["batch"], bf16=False)))
    answers.write(json.dumps({"ready": True}) + "\n")
    done = 0
    for line in sys.stdin:
        count = json.loads(line)["steps"]
        batches = [make_batch(done + index, dist.get_rank() // tp, size) for index in range(count)]
        dist.barrier()
        start = time.perf_counter()
        losses = [step(batch) for batch in batches]
        seconds = (time.perf_counter() - start) / count
        done += count
        answers.write(json.dumps({"seconds": seconds, "loss": losses[-1]}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", type=json.loads, help="JSON: package, tp, stage")
    parser.add_argument("shape", choices=["gpt2", "llama"])
    parser.add_argument("size", type=json.loads, help="JSON: layers, width, heads, vocab, length, batch")
    arguments = parser.parse_args()
    answers = open_answers()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contender = arguments.contender
    if contender["package"] != "account":
        serve(contender, arguments.shape, arguments.size, answers)
        return
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(account(**json.loads(line), shape=arguments.shape, size=arguments.size)) + "\n")


if __name__ == "__main__":
    main()
