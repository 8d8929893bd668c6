"""A loop of accelerate as users write it, for two launcher files of one run: FSDP's, and the one that ``hf-zero plan --from`` made of it.

accelerate shards with FSDP on accelerators only. So where its launcher asks for FSDP, the plugin that it makes of the launcher's variables
is given to the state of a CPU's Accelerator; from there on everything is accelerate's own path.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, LENGTH, ROWS, BATCH = 64, 16, 24, 2
CLIP, RATE = 1.0, 3e-3


def accelerator_of(steps: int) -> Accelerator:
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return Accelerator(gradient_accumulation_steps=steps)
    meshed = os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", "") == "true"
    del os.environ["ACCELERATE_USE_FSDP"]
    made = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    plugin = FullyShardedDataParallelPlugin()
    if made.mixed_precision != "no":
        plugin.set_mixed_precision(made.mixed_precision)
    made.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # each state made later reads it
    made.state.fsdp_plugin = plugin
    if plugin.fsdp_version == 2 and plugin.cpu_offload:
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    if meshed:
        made.state.parallelism_config = ParallelismConfig()
        made.state.device_mesh = made.parallelism_config.build_device_mesh("cpu")
    return made


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        vocab_size=VOCAB,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def losses_of_distributed_config(folder: str, settings: dict[str, Any], config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses on ranks, of transformers' own sharding by ``DistributedConfig(**settings)`` and of the engine with ``config``."""
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    import hf_zero

    rank, world = dist.get_rank(), dist.get_world_size()
    batches = [
        torch.stack([row["input_ids"] for row in rows()[first + rank : first + 2 * world : world]]) for first in range(0, ROWS, 4)
    ] * 2
    theirs: Any = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**settings)).train()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=RATE)
    found: tuple[list[float], list[float]] = ([], [])
    for ids in batches:
        loss = theirs(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[0].append(loss.item())
    ours = LlamaForCausalLM.from_pretrained(folder).train()
    engine = hf_zero.initialize(model=ours, optimizer=torch.optim.AdamW(ours.parameters(), lr=RATE), config=config)[0]
    for ids in batches:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found[1].append(loss.item())
    engine.destroy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulation", type=int, default=1)
    args = parser.parse_args()
    accelerator = accelerator_of(args.accumulation)
    model: Any = small_llama()
    count = sum(param.numel() for param in model.parameters())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), batch_size=BATCH))
    held = sum(getattr(param, "to_local", lambda param=param: param)().numel() for param in model.parameters())
    losses = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().float()).mean().item())
    stage = None if accelerator.is_fsdp2 else accelerator.state.deepspeed_plugin.zero_stage
    if accelerator.is_main_process:
        print(
            "REPORT", json.dumps({"fsdp2": bool(accelerator.is_fsdp2), "losses": losses, "held": held, "parameters": count, "stage": stage})
        )


if __name__ == "__main__":
    main()
