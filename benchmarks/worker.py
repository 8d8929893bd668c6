"""One rank of one contender of the step-time benchmark. Started by ``step_time.py``, also with the Python of a peer's venv.

Reads one JSON object per line from standard input and answers one per line: ``{"steps": K}`` runs K training steps and returns
the seconds per step, the last loss and the process's peak memory. Needs only torch, transformers and the contender's package.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from processes import open_answers
from torch import Tensor, nn

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
Step = Callable[[dict[str, Tensor]], float]


# ------------------------------------------------------------------------------------------------ model and data


def build_model(shape: str, size: dict[str, int]) -> nn.Module:
    """Return GPT-2 or Llama with random weights, the same on every rank and in every contender."""
    torch.manual_seed(0)
    if shape == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=size["vocab"],
                n_positions=size["length"],
                n_embd=size["width"],
                n_layer=size["layers"],
                n_head=size["heads"],
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )  # fmt: skip
        )
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size["vocab"],
            hidden_size=size["width"],
            intermediate_size=size["width"] * 8 // 3 // 32 * 32,
            num_hidden_layers=size["layers"],
            num_attention_heads=size["heads"],
            num_key_value_heads=size["heads"] // 2,
            max_position_embeddings=size["length"],
            tie_word_embeddings=False,
            use_cache=False,
        )  # fmt: skip
    )


def make_batch(step: int, rank: int, size: dict[str, int]) -> dict[str, Tensor]:
    """Return random tokens (batch, length) that depend on step and rank only."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, size["vocab"], (size["batch"], size["length"]), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


# ------------------------------------------------------------------------------------------------ contenders


def plain_loop(model: nn.Module) -> Step:
    """Return forward, backward, fused AdamW, zero_grad on ``model``: the bare PyTorch loop, and DDP's and FSDP2's."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step(batch: dict[str, Tensor]) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


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


def engine_loop(engine: Any) -> Step:
    def step(batch: dict[str, Tensor]) -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


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


# ------------------------------------------------------------------------------------------------ loop


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
