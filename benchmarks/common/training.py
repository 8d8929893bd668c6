"""The models, batches and loops that benchmarks share. Needs only torch and transformers, because ranks of peers import it, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
Step = Callable[[dict[str, Tensor]], float]


def build_model(shape: str, size: dict[str, int]) -> nn.Module:
    """Return GPT-2 or Llama with random weights, the same on every rank and in every contender.

    ``size`` has layers, width, heads, vocab and length; for Llama also inner, the width of the feed-forward layers, if it is not 8/3 of the
    width, and kv_heads, if they are not half of the heads.
    """
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
            intermediate_size=size.get("inner", size["width"] * 8 // 3 // 32 * 32),
            num_hidden_layers=size["layers"],
            num_attention_heads=size["heads"],
            num_key_value_heads=size.get("kv_heads", size["heads"] // 2),
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


def plain_loop(model: nn.Module) -> Step:
    """Return the bare PyTorch step on ``model``, also for DDP and FSDP2: forward, backward, fused AdamW, zero_grad."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step(batch: dict[str, Tensor]) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def engine_loop(engine: Any) -> Step:
    def step(batch: dict[str, Tensor]) -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step
