"""One rank of ``plan_order.py``: for each request it builds an engine, trains one step, and times the next ones."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.processes import serve_ranks


def seconds_of(config: dict[str, Any], settings: dict[str, Any], recomputes: bool, length: int, steps: int) -> float:
    """Return the mean seconds of an optimizer step of a small Llama under ``config``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_zero

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings, use_cache=False)).train()
    if recomputes:
        model.gradient_checkpointing_enable()
    engine = hf_zero.initialize(model=model, config=config)[0]
    tokens = torch.randint(0, settings["vocab_size"], (config["train_micro_batch_size_per_gpu"], length))

    def step() -> None:
        for _ in range(config["gradient_accumulation_steps"]):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

    step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    taken = (time.perf_counter() - start) / steps
    engine.destroy()
    gc.collect()
    return taken


if __name__ == "__main__":
    serve_ranks(lambda request: {"seconds": seconds_of(**request)})
