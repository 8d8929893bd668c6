"""Pieces of a model that libraries replace by kernels: each stage has the numbers of the same model in plain PyTorch.

Kernels need a GPU. So stand-ins for them read parameters in the ways of the libraries: a forward bound to the instance whose function saves
the weight itself (Liger's ``use_liger_kernel``, ``use_kernels`` of transformers), an attention function by name (``attn_implementation``),
and a head's weight that the loss reads outside of the head (``tests/support/fused_losses.py``).
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import fused_losses, ranks
from tests.support.models import CASES, VOCAB, Batch
from tests.support.parity import DTYPES, Run, check_training

ATTENTION = "stand_in"  # transformers imports a library for names with "flash"


class Norm(torch.autograd.Function):
    """RMSNorm whose backward reads the weight that forward has saved, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the normalised ``hidden`` (..., width), times ``weight`` (width,)."""
        ctx.save_for_backward(hidden, weight)
        ctx.eps = eps
        return functional.rms_norm(hidden, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients, computed anew."""
        hidden, weight = (value.detach().requires_grad_() for value in ctx.saved_tensors)
        with torch.enable_grad():
            output = functional.rms_norm(hidden, weight.shape, weight, ctx.eps)
        return *torch.autograd.grad(output, (hidden, weight), grad), None  # type: ignore[return-value]


def _norm(self: Any, hidden: Tensor) -> Tensor:
    output: Tensor = Norm.apply(hidden, self.weight, self.variance_epsilon)
    return output


def _feed_forward(self: Any, hidden: Tensor) -> Tensor:
    """Compute both halves in one product and call the last layer, as fused feed-forward layers do."""
    both = functional.linear(hidden, torch.cat([self.gate_proj.weight, self.up_proj.weight]))
    gate, up = both.chunk(2, dim=-1)
    output: Tensor = self.down_proj(functional.silu(gate) * up)
    return output


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> tuple[Tensor, None]:
    """Attend causally, with arguments and results of transformers' attention functions."""
    key, value = (part.repeat_interleave(module.num_key_value_groups, 1) for part in (key, value))
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def _model(checkpointing: str = "", lora: bool = False) -> nn.Module:
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register(ATTENTION, _attention)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, use_cache=False, attn_implementation=ATTENTION, **size))
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = MethodType(_norm, module)
            if type(module).__name__ == "LlamaMLP" and not lora:
                module.forward = MethodType(_feed_forward, module)
        fused_losses.liger(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"))
    return model.train()


def _feed(step: int, micro: int, rank: int) -> Batch:
    return CASES["llama"].rows(step, micro, rank)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _against_plain(cases: list[tuple[Run, dict[str, Any]]]) -> None:
    for run, kind in cases:
        check_training(partial(_model, **kind), _feed, _loss, run, label=str(kind))


def test_pieces_replaced_by_kernels() -> None:
    kinds: list[tuple[int, str, dict[str, Any]]] = [
        (0, "fp32", {}),
        (2, "bf16", {"lora": True}),
        (3, "bf16", {"checkpointing": "reentrant"}),
    ]
    ranks.run_ranks(_against_plain, 2, [(Run(stage, dtype, accumulation=2, clip=0.1), kind) for stage, dtype, kind in kinds])


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("lora", [False, True])
def test_pieces_at_every_stage(checkpointing: str, lora: bool) -> None:
    kind = {"checkpointing": checkpointing, "lora": lora}
    ranks.run_ranks(_against_plain, 2, [(Run(stage, dtype, accumulation=2, clip=0.1), kind) for stage in range(4) for dtype in DTYPES])
