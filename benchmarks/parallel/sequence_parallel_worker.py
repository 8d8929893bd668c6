"""One of two ranks of one contender of the sequence-parallel benchmark. Started by ``sequence_parallel.py``, also with a peer's Python.

It reads one JSON object per line from standard input. ``{"steps": K, "length": S}`` runs K training steps over sequences of S tokens and
answers with the seconds per step and the last loss; ``{"peak": true, "length": S}`` with the bytes of tensors a step adds at its peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.peak_memory import peak_of
from benchmarks.common.processes import open_answers
from benchmarks.common.training import ADAMW

Batch = dict[str, torch.Tensor]


def build(size: dict[str, int]) -> nn.Module:
    """Return a Llama with half as many key heads as query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["width"],
        intermediate_size=2 * size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"] // 2,
        max_position_embeddings=size["longest"],
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def start(package: str, size: dict[str, int]) -> tuple[Any, Any]:
    """Return an engine of ``hf_zero`` or ``deepspeed`` at stage 1, and its sequence-parallel groups; None for whole sequences."""
    module, mpu = build(size), None
    if package == "deepspeed":
        import deepspeed as library
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    else:
        import hf_zero as library
        from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
    if package != "whole":
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=module, core_attn_implementation="sdpa", sequence_parallel_size=dist.get_world_size(), micro_batch_size=1
        )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's default buckets take 2 GB for models of any size.
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000},
    }
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    return library.initialize(model=module, optimizer=optimizer, config=config, mpu=mpu)[0], mpu


def batch_of(length: int, size: dict[str, int], sliced: bool) -> Batch:
    """Return this rank's slice of one sequence, or a sequence of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0 if sliced else rank)
    tokens = torch.randint(0, size["vocab"], (1, length), generator=generator)
    batch = {"input_ids": tokens, "position_ids": torch.arange(length)[None]}
    if not sliced:
        return {**batch, "labels": tokens}
    batch["shift_labels"] = nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    own = slice(rank * length // world, (rank + 1) * length // world)
    return {name: value[:, own].contiguous() for name, value in batch.items()}


def train(engine: Any, mpu: Any, batch: Batch) -> float:
    """Train one step; return the loss over all tokens."""
    from torch.distributed.nn import functional

    if mpu is None:
        loss = engine(**batch).loss
    else:
        own = engine(**batch, labels=batch["shift_labels"]).loss
        group = mpu.get_sequence_parallel_group()
        losses = torch.stack(functional.all_gather(own, group=group))
        counts = torch.stack(functional.all_gather((batch["shift_labels"] != -100).sum(), group=group))
        loss = (losses * counts).sum() / counts.sum()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("package", choices=("hf_zero", "deepspeed", "whole"))
    parser.add_argument("size", type=json.loads)
    arguments = parser.parse_args()
    answers = open_answers()
    if arguments.package == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    engine, mpu = start(arguments.package, arguments.size)
    answers.write("{}\n")
    for line in sys.stdin:
        request = json.loads(line)
        batch = batch_of(request["length"], arguments.size, mpu is not None)
        if request.get("peak"):
            answers.write(json.dumps({"peak": peak_of(partial(train, engine, mpu, batch))}) + "\n")
            continue
        dist.barrier()
        began, loss = time.perf_counter(), 0.0
        for _ in range(request["steps"]):
            loss = train(engine, mpu, batch)
        answers.write(json.dumps({"seconds": (time.perf_counter() - began) / request["steps"], "loss": loss}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
