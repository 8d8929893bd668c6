"""The models, batches and loops that benchmarks share. Needs only torch and transformers, because ranks of peers import it, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
Step = Callable[[dict[str, Tensor]], float]


def build_model(shape: str, size: dict[str, int]) -> nn.Module:
    """Return a model with random weights, the same on every rank and in every contender.

    Args:
        shape: ``gpt2``, ``llama``, or with the dropout of the published models ``deberta-v2`` (a classifier) and ``blenderbot``.
        size: layers, width, heads, vocab and length; for Llama also inner, the width of the feed-forward layers, if it is not 8/3 of the
            width, and kv_heads, if they are not half of the heads; for a classifier classes; for BlenderBot encoder_layers.
    """
    torch.manual_seed(0)
    if shape == "deberta-v2":
        return _classifier(size)
    if shape == "blenderbot":
        return _blenderbot(size)
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


def _classifier(size: dict[str, int]) -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    return DebertaV2ForSequenceClassification(
        DebertaV2Config(
            vocab_size=size["vocab"],
            hidden_size=size["width"],
            intermediate_size=4 * size["width"],
            num_hidden_layers=size["layers"],
            num_attention_heads=size["heads"],
            relative_attention=True,
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            type_vocab_size=0,
            conv_kernel_size=3,
            conv_act="gelu",
            pooler_hidden_size=size["width"],
            num_labels=size["classes"],
        )  # fmt: skip
    )


def _blenderbot(size: dict[str, int]) -> nn.Module:
    from transformers import BlenderbotConfig, BlenderbotForConditionalGeneration

    return BlenderbotForConditionalGeneration(
        BlenderbotConfig(
            vocab_size=size["vocab"],
            d_model=size["width"],
            encoder_layers=size["encoder_layers"],
            decoder_layers=size["layers"],
            encoder_attention_heads=size["heads"],
            decoder_attention_heads=size["heads"],
            encoder_ffn_dim=4 * size["width"],
            decoder_ffn_dim=4 * size["width"],
            max_position_embeddings=size["length"],
            scale_embedding=True,
            use_cache=False,
        )  # fmt: skip
    )


def make_batch(step: int, rank: int, size: dict[str, int]) -> dict[str, Tensor]:
    """Return random tokens (batch, length) that depend on step and rank only.

    Labels are the tokens; with ``size["classes"]`` one class for each sample, with ``size["targets"]`` so many other tokens.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, size["vocab"], (size["batch"], size["length"]), generator=generator)
    if "classes" in size:
        return {"input_ids": tokens, "labels": torch.randint(0, size["classes"], (size["batch"],), generator=generator)}
    if "targets" in size:
        return {"input_ids": tokens, "labels": torch.randint(0, size["vocab"], (size["batch"], size["targets"]), generator=generator)}
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
