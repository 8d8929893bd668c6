"""Attention of some queries to some keys, with what merging it with attention to other keys takes: the logarithms of its sums.

[Note: partial attention] With ``lse`` the logarithm of the sum of exponentials of a query's scores, attention to two sets of keys is the
mean of the two results weighted by ``exp(lse)``; and the gradients of one block follow from the final result and the final ``lse``
(Dao et al. 2022, "FlashAttention", arXiv 2205.14135; Liu et al. 2023, "Ring Attention", arXiv 2310.01889). Blocks without a mask and
without dropout are computed by torch's fused kernels where they serve; others row by row in fp32, whose memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.errors import UnsupportedError

_TILE = 1 << 24  # scores computed at a time
_ATEN: Any = torch.ops.aten
_GREATEST_WIDTH = 256  # of a head, that torch's kernel for CUDA takes
CUDA_KERNELS = ["cuda"]  # kinds of devices that have them; a plan adds the one that it simulates


@dataclass(frozen=True)
class Scores:
    """Rules of a block's scores.

    Attributes:
        scale: Factor of the products of queries and keys.
        dropout: Probability with which a weight is dropped.
        seed: Of the dropped weights of this block; another for every block.
        causal: Query ``i`` of the block sees its keys up to ``i`` only.
        mask: What each query sees (bool), or what is added to scores; (1 or batch, 1 or heads, 1 or queries, keys). None masks nothing.
    """

    scale: float
    dropout: float = 0.0
    seed: int = 0
    causal: bool = False
    mask: torch.Tensor | None = None


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of a block, and the logarithms of its sums.

    Args:
        query: (batch, heads, queries, width).
        key: (batch, heads, keys, width).
        value: (batch, heads, keys, width of values).
        scores: The rules.

    Returns:
        (batch, heads, queries, width of values) and (batch, heads, queries), both fp32 at least; 0 and -inf for queries that see no key.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    if _is_plain(scores) and is_fused(query, value):
        if query.device.type == "cpu":
            out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, scores.causal, scale=scores.scale)
        else:
            out, lse = _ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, scores.causal, scale=scores.scale)[:2]
        return out.to(wide), lse.to(wide)
    out = torch.empty(*query.shape[:3], value.shape[3], dtype=wide, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=wide, device=query.device)
    columns, values = key.to(wide).mT, value.to(wide)
    for turn, rows in enumerate(_tiles(query, key)):
        found = _scores_of(query[:, :, rows].to(wide), columns, scores, rows)
        lse[:, :, rows] = found.logsumexp(-1)
        weights = _weights(found, lse[:, :, rows])
        kept = _kept(weights, scores, turn)
        out[:, :, rows] = (weights if kept is None else weights * kept) @ values
    return out, lse


def merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Merge the attention of a further block into ``out`` and ``lse``, in place; shapes and dtypes as ``attend`` returns them."""
    total = torch.logaddexp(lse, more_lse)
    base = total.masked_fill(total == -torch.inf, 0.0)
    out.mul_((lse - base).exp_().unsqueeze(-1)).add_(more * (more_lse - base).exp_().unsqueeze(-1))
    lse.copy_(total)


def gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, out: torch.Tensor, lse: torch.Tensor, above: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a block's parts of the gradients of its query, key and value: in the dtype of ``query`` where a kernel computes them, else in
    fp32 at least. Callers add them up in fp32.

    Args:
        query: As ``attend``'s.
        key: As ``attend``'s.
        value: As ``attend``'s.
        scores: As ``attend``'s.
        out: The attention of these queries to all keys, in the dtype of ``query``.
        lse: Its logarithms of sums, fp32 at least.
        above: The gradient of ``out``, in its dtype.
    """
    if _is_plain(scores) and is_fused(query, value):
        return _fused_gradients(query, key, value, scores, out, lse, above)
    wide = torch.promote_types(query.dtype, torch.float32)
    of_query = torch.empty_like(query, dtype=wide)
    of_key, of_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
    keys, values = key.to(wide), value.to(wide)
    for turn, rows in enumerate(_tiles(query, key)):
        queries, grads = query[:, :, rows].to(wide), above[:, :, rows].to(wide)
        weights = _weights(_scores_of(queries, keys.mT, scores, rows), lse[:, :, rows])
        kept, of_weights = _kept(weights, scores, turn), grads @ values.mT
        of_value += (weights if kept is None else weights * kept).mT @ grads
        if kept is not None:
            of_weights *= kept
        mean = (grads * out[:, :, rows].to(wide)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - mean) * scores.scale
        of_query[:, :, rows] = of_scores @ keys
        of_key += of_scores.mT @ queries
    return of_query, of_key, of_value


def is_fused(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether torch has a kernel for blocks of these shapes and dtypes without a mask and without dropout."""
    if query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cpu":
        return True
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type in CUDA_KERNELS and half and query.shape[-1] <= _GREATEST_WIDTH and query.shape[-1] % 8 == 0


def _is_plain(scores: Scores) -> bool:
    return scores.mask is None and not scores.dropout


def _fused_gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, out: torch.Tensor, lse: torch.Tensor, above: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if query.device.type == "cpu":
        given = above.contiguous(), query, key, value, out, lse
        parts = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, scores.causal, scale=scores.scale)
    else:
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout
        logs = lse.contiguous()  # the kernel ignores its strides
        parts = _ATEN._scaled_dot_product_flash_attention_backward(
            above, query, key, value, out, logs, None, None, query.shape[2], key.shape[2], 0.0, scores.causal, unused, unused[:0],
            scale=scores.scale,
        )  # fmt: skip
    of_query, of_key, of_value = parts
    return of_query, of_key, of_value


def added_to(sums: torch.Tensor, gradients: torch.Tensor, heads: int) -> None:
    """Add the gradients of keys or values of several query heads that read one key head to ``sums``, in the dtype of ``sums``.

    Args:
        sums: (batch, key heads, keys, width).
        gradients: (batch, key heads * heads, keys, width); the query heads of a key head follow each other.
        heads: Query heads of each key head.
    """
    sums += gradients if heads == 1 else gradients.unflatten(1, (-1, heads)).sum(2, dtype=sums.dtype)


def _tiles(query: torch.Tensor, key: torch.Tensor) -> list[slice]:
    batch, heads, rows = query.shape[:3]
    each = max(1, _TILE // max(1, batch * heads * key.shape[2]))
    return [slice(start, min(start + each, rows)) for start in range(0, rows, each)]


def _scores_of(query: torch.Tensor, columns: torch.Tensor, scores: Scores, rows: slice) -> torch.Tensor:
    found = (query @ columns) * scores.scale
    mask = scores.mask
    if mask is not None:
        part = mask if mask.shape[-2] == 1 else mask[..., rows, :]
        found = found.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else found + part
    if scores.causal:
        later = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).triu(rows.start + 1)
        found = found.masked_fill(later, -torch.inf)
    return found


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the shares of ``scores`` in sums whose logarithms are ``lse``; 0 in sums of nothing."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()


def _kept(weights: torch.Tensor, scores: Scores, turn: int) -> torch.Tensor | None:
    """Return 0 where a weight is dropped, and the factor of the others; the same in forward and backward."""
    if not scores.dropout:
        return None
    generator = torch.Generator(weights.device).manual_seed(scores.seed * 4096 + turn)
    drawn = torch.rand(weights.shape, generator=generator, device=weights.device, dtype=torch.float32)
    return (drawn >= scores.dropout).to(weights.dtype) / (1.0 - scores.dropout)


class _Refusal(torch.autograd.Function):
    """Identity of gradients whose backward raises."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            "attention of context parallelism was differentiated twice (a gradient penalty, a backward with create_graph=True), and its "
            "gradient has no derivative. Leave the penalty out, or train this model without it"
        )


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorate the backward of a function of this attention as torch's decorator of this name does, with an error that names it."""

    def once(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        wanted = [index for index, value in enumerate(found) if isinstance(value, torch.Tensor)]
        refused = _Refusal.apply(*(found[index].detach().requires_grad_() for index in wanted))  # type: ignore[no-untyped-call]
        places = dict(zip(wanted, refused, strict=True))
        return tuple(places.get(index, value) for index, value in enumerate(found))

    return once
