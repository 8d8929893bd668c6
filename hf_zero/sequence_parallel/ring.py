"""Attention to keys and values that are passed around: context parallelism by "alltoall".

In each of as many steps as there are places a rank computes attention to the part of keys and values that it holds, while that part goes
on to the next rank and the next part comes in ([Note: partial attention] is how results are merged). No rank ever holds all of them. In
backward they go around once more, and the gradients of each part go with it, one step behind, until they are back where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.errors import UnsupportedError
from hf_zero.sequence_parallel.attention import Core
from hf_zero.sequence_parallel.blocks import Scores, added_to, attend, gradients, merge, once_differentiable
from hf_zero.sequence_parallel.gathered import SDPA, ContextAttention, causal_rows, require_rows
from hf_zero.sequence_parallel.joining import Layout


@dataclass(frozen=True)
class _Rules:
    """Rules of a whole attention.

    Attributes:
        scores: What all blocks have in common; its seed is the first block's.
        causal: No query sees a later key.
        mask: Rows of this place; None masks nothing but later keys, if ``causal``.
        groups: Query heads that read one key head.
    """

    scores: Scores
    causal: bool
    mask: torch.Tensor | None
    groups: int


class RingAttention(ContextAttention):
    """Attention of one model's modules that passes keys and values from rank to rank in a ring."""

    def _of_place(
        self, core: Core, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> torch.Tensor:
        if getattr(core, "__module__", None) != SDPA:
            raise UnsupportedError(
                f"context parallelism: the model's attention function is {core!r}, but 'alltoall' supports only {SDPA}; choose "
                "'allgather' (hf_zero.context_parallel_strategy, cp_comm_strategy)"
            )
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if isinstance(mask, torch.Tensor):
            require_rows(mask, query.shape[2], key.shape[2] * self.across.world)
            causal = mask in causal_rows
        scale, dropout = kwargs.get("scaling"), float(kwargs.get("dropout") or 0.0)
        seed = int(torch.randint(2**31, ())) if dropout else 0  # of this rank's own stream
        scores = Scores(float(scale) if scale is not None else query.shape[-1] ** -0.5, dropout, seed)
        rules = _Rules(scores, bool(causal), mask, query.shape[1] // key.shape[1])
        found: torch.Tensor = _Ring.apply(self.layout, self.across, rules, query, key, value)  # type: ignore[no-untyped-call]
        return found.transpose(1, 2)


def require_ring(model: nn.Module, implementation: str) -> None:
    """Refuse models whose attention function is not the one that "alltoall" supports.

    Raises:
        UnsupportedError: It is another.
    """
    if implementation != "sdpa":
        raise UnsupportedError(
            f"context parallelism: 'alltoall' computes attention as 'sdpa' does, and {type(model).__name__} was made with "
            f"attn_implementation={implementation!r}; make it with 'sdpa', or choose 'allgather' (hf_zero.context_parallel_strategy, "
            "cp_comm_strategy)"
        )


class _Ring(torch.autograd.Function):
    """(batch, heads, tokens, width) of query, key and value -> attention, (batch, heads, tokens, width of values)."""

    @staticmethod
    def forward(
        ctx: Any, layout: Layout, across: Collectives, rules: _Rules, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(*query.shape[:3], value.shape[3], dtype=wide, device=query.device)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=wide, device=query.device)
        held = _Passed.of(key, value)
        for step in range(across.world):
            coming = held.pass_on(across, "keys") if step + 1 < across.world else None
            for rows, columns, scores in _blocks(layout, rules, step, query.shape[2]):
                merge(out[:, :, rows], lse[:, :, rows], *attend(query[:, :, rows], *held.part(columns, rules.groups), scores))
            held = coming.received() if coming is not None else held
        result = out.to(query.dtype)
        ctx.layout, ctx.across, ctx.rules = layout, across, rules
        ctx.save_for_backward(query, key, value, result, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        layout, across, rules = ctx.layout, ctx.across, ctx.rules
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        held = _Passed.of(key, value)
        arriving: _Coming | None = None
        for step in range(across.world):
            coming = held.pass_on(across, "keys") if step + 1 < across.world else None
            sums = held.zeros(lse.dtype)
            for rows, columns, scores in _blocks(layout, rules, step, query.shape[2]):
                parts = (query[:, :, rows], *held.part(columns, rules.groups), scores)
                found = gradients(*parts, out[:, :, rows], lse[:, :, rows], above[:, :, rows])
                of_query[:, :, rows] += found[0]
                added_to(sums.key[:, :, columns], found[1], rules.groups)
                added_to(sums.value[:, :, columns], found[2], rules.groups)
                del parts, found  # before the next block is computed
            if arriving is not None:
                sums.message.add_(arriving.received().message)
                arriving = None  # its memory is free for the next one
            arriving = sums.pass_on(across, "gradients of keys")
            held = coming.received() if coming is not None else held
        sums = arriving.received() if arriving is not None else sums
        return None, None, None, of_query.to(query.dtype), sums.key.to(key.dtype), sums.value.to(value.dtype)


@dataclass(frozen=True)
class _Passed:
    """Keys and values of one place in one message.

    Attributes:
        message: Both, one after the other, (n,).
        key: A view of it, (batch, key heads, tokens, width).
        value: A view of it, maybe of another width.
    """

    message: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @staticmethod
    def of(key: torch.Tensor, value: torch.Tensor) -> _Passed:
        """Return copies of ``key`` and ``value`` in one message."""
        return _Passed._over(torch.cat([key.reshape(-1), value.reshape(-1)]), key.shape, value.shape)

    @staticmethod
    def _over(message: torch.Tensor, key: torch.Size, value: torch.Size) -> _Passed:
        first, second = message.split([key.numel(), value.numel()])
        return _Passed(message, first.view(key), second.view(value))

    def zeros(self, dtype: torch.dtype) -> _Passed:
        """Return zeros of the same shapes in ``dtype``."""
        return _Passed._over(torch.zeros_like(self.message, dtype=dtype), self.key.shape, self.value.shape)

    def part(self, columns: slice, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the tokens ``columns``, with each head as often as ``groups`` query heads read it."""
        key, value = self.key[:, :, columns], self.value[:, :, columns]
        return (key, value) if groups == 1 else (key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))

    def pass_on(self, across: Collectives, what: str) -> _Coming:
        """Start to send this to the next rank, and to receive the previous one's; collective."""
        empty, incoming = self.message.new_empty(0), torch.empty_like(self.message)
        after, before = (across.rank + 1) % across.world, (across.rank - 1) % across.world
        send = [self.message if rank == after else empty for rank in range(across.world)]
        receive = [incoming if rank == before else empty for rank in range(across.world)]
        return _Coming(across.exchange_parts(send, receive, what), _Passed._over(incoming, self.key.shape, self.value.shape))


@dataclass(frozen=True)
class _Coming:
    """Tensors on their way from the previous rank."""

    pending: Pending
    passed: _Passed

    def received(self) -> _Passed:
        """Wait for it."""
        self.pending.wait()
        return self.passed


def _blocks(layout: Layout, rules: _Rules, step: int, tokens: int) -> Iterator[tuple[slice, slice, Scores]]:
    """Yield the blocks of queries of this place and keys of the place that it holds in a step, which see any of each other, as slices of
    both, with their rules.

    Args:
        layout: The division of sequences.
        rules: The rules of all blocks.
        step: Number of times that keys were passed on.
        tokens: Of one place.
    """
    other, length = (layout.place - step) % layout.places, tokens * layout.places
    halves = (slice(0, tokens // 2), slice(tokens // 2, tokens))
    for turn, (rows, (first, _)) in enumerate(zip(halves, layout.parts(length), strict=True)):
        for half, (columns, (start, end)) in enumerate(zip(halves, layout.parts(length, other), strict=True)):
            if rules.causal and start > first:
                continue
            seed = (rules.scores.seed * 64 + step) * 4 + 2 * turn + half
            mask = rules.mask
            if mask is not None:
                mask = mask[..., start:end] if mask.shape[-2] == 1 else mask[..., rows, start:end]
            yield rows, columns, replace(rules.scores, seed=seed, causal=rules.causal and mask is None and start == first, mask=mask)
