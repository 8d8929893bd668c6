"""One rank of ``plan_order.py``: for each request it builds an engine, trains one step, and times the next ones."""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from processes import open_answers


def seconds_of(config: dict[str, Any], settings: dict[str, Any], recomputes: bool, length: int, steps: int) -> float:
    """Seconds of an optimizer step."""
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


def main() -> None:
    """Answers requests."""
    answers = open_answers()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps({"seconds": seconds_of(**json.loads(line))}) + "\n")


if __name__ == "__main__":
    main()
