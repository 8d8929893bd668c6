"""Causal language models whose loss never makes the logits, in the forms that libraries use, with the numbers of whole logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.sequences import llama

TOKENS_OF_CHUNK = 5
LARGE_VOCABULARY = 40_000  # times a width of 32: more than grouping.LARGE_MODULE_NUMEL elements


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Liger's loss: forward takes the head's weight and computes gradients of weight and hidden states by chunks; backward scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of (tokens, width) against (tokens,), where targets are not -100."""
        count = (targets != -100).sum().clamp(min=1)
        total, to_hidden, to_weight = hidden.new_zeros(()), torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), TOKENS_OF_CHUNK):
            rows = slice(start, start + TOKENS_OF_CHUNK)
            with torch.enable_grad():
                logits = (hidden[rows].detach() @ weight.detach().T).float().requires_grad_()
                loss = functional.cross_entropy(logits, targets[rows], ignore_index=-100, reduction="sum") / count
            (grad,) = torch.autograd.grad(loss, logits)
            total += loss.detach()
            to_hidden[rows] = grad.to(hidden.dtype) @ weight
            to_weight += grad.to(weight.dtype).T @ hidden[rows]
        ctx.save_for_backward(to_hidden, to_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients that forward has computed, times ``grad``."""
        to_hidden, to_weight = ctx.saved_tensors
        return to_hidden * grad, to_weight * grad, None


def _hidden_and_targets(model: Any, labels: Tensor | None, shift_labels: Tensor | None, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    hidden = model.model(**given).last_hidden_state
    return hidden, functional.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels


def liger(model: Any) -> None:
    """Patch a model like Liger's kernels: a forward of the instance that, given labels, reads ``lm_head.weight`` outside its module."""

    @functools.wraps(type(model).forward)
    def forward(self: Any, labels: Tensor | None = None, shift_labels: Tensor | None = None, **given: Any) -> SimpleNamespace:
        if labels is None and shift_labels is None:
            return {"logits": self.lm_head(self.model(**given).last_hidden_state)}
        hidden, targets = _hidden_and_targets(self, labels, shift_labels, given)
        return SimpleNamespace(loss=FusedLinearCrossEntropy.apply(hidden.flatten(0, 1), self.lm_head.weight, targets.flatten()))

    model.forward = MethodType(forward, model)


def trl(model: Any) -> None:
    """Patch a model with the fused head of TRL's SFT, DPO, KTO, GRPO and RLOO trainers (``loss_type="nll"``, earlier ``"chunked_nll"``)."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)
    model.forward = functools.partial(model.forward, fused_lm_head=True)


def tiled(model: Any) -> None:
    """Patch a model like ALST: the loss and every feed-forward layer are computed tile by tile."""
    from hf_zero.sequence_parallel.tiled import TiledFusedLogitsLoss, TiledMLP

    def of_tile(head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(head(hidden).float(), targets, ignore_index=-100, reduction="sum")

    @functools.wraps(type(model).forward)
    def forward(self: Any, labels: Tensor | None = None, shift_labels: Tensor | None = None, **given: Any) -> SimpleNamespace:
        hidden, targets = _hidden_and_targets(self, labels, shift_labels, given)
        total = TiledFusedLogitsLoss.apply(of_tile, self.lm_head, hidden, targets, None, 3, None, "sum")
        return SimpleNamespace(loss=total / (targets != -100).sum().clamp(min=1))

    for layer in model.model.layers:
        whole = type(layer.mlp).forward
        layer.mlp.forward = MethodType(lambda self, x, whole=whole: TiledMLP.apply(whole, self, x, 4), layer.mlp)
    model.forward = MethodType(forward, model)


KINDS: dict[str, Callable[[Any], None]] = {"liger": liger, "trl": trl, "tiled": tiled}


def model(kind: str | None, tied: bool = False, large: bool = False) -> nn.Module:
    """Return a small Llama; with None its loss is over whole logits. ``large``: embedding and head are blocks of their own."""
    made = llama(tie_word_embeddings=tied)
    if large:
        made.resize_token_embeddings(LARGE_VOCABULARY, mean_resizing=False)
    if kind is not None:
        KINDS[kind](made)
    return made
