"""Attention of this rank's queries to the keys and values of all ranks, gathered per layer: context parallelism by "allgather".

Since keys and values are whole, the model's own attention function computes each query's row as it would on one rank: masks of any kind,
sinks, soft caps, dropout and head sizes are its own affair, and nothing has to be merged. What changes is which rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_zero.comm.collectives import Collectives
from hf_zero.core.schedule.torch_internals import outside_compile
from hf_zero.errors import UnsupportedError
from hf_zero.sequence_parallel.attention import _OF_SLICES, Core, SlicedAttention, with_own_heads
from hf_zero.sequence_parallel.blocks import Scores, added_to, attend, gradients, is_fused, merge, once_differentiable
from hf_zero.sequence_parallel.joining import Layout

SDPA = "transformers.integrations.sdpa_attention"  # where the function is whose numbers blocks have
_AT_ONCE_BYTES = 1 << 28  # of keys and values of whole sequences for query heads, and of their gradients
causal_rows = WeakTensorKeyDictionary()  # masks of this rank's rows in which no token sees a later one


class _GatherKeys(torch.autograd.Function):
    """Keys and values of all places, in the order of sequences; the gradients of each place's are summed there."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, across: Collectives, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.layout, ctx.across = layout, across
        own = torch.cat([part.reshape(-1) for part in parts])
        message = torch.empty(across.world, own.numel(), dtype=own.dtype, device=own.device)
        across.all_gather(message.view(-1), own, "keys").wait()
        whole = tuple(part.new_empty(*part.shape[:2], part.shape[2] * across.world, part.shape[3]) for part in parts)
        for sent, run in _runs_in(message, layout, whole):
            run.copy_(sent)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layout, across = ctx.layout, ctx.across
        sizes = [gradient.numel() // across.world for gradient in gradients]
        dtype = reduce(torch.promote_types, (gradient.dtype for gradient in gradients))
        message = torch.empty(across.world, sum(sizes), dtype=dtype, device=gradients[0].device)
        for sent, run in _runs_in(message, layout, gradients):
            sent.copy_(run)
        wide = torch.promote_types(dtype, torch.float32)  # of the additions, where they are ours
        summed = across.reduce_scatter(message.view(-1), wide, "keys").received().split(sizes)
        parts = zip(summed, gradients, strict=True)
        return None, None, *(part.view(*given.shape[:2], -1, given.shape[3]).to(given.dtype) for part, given in parts)


def _runs_in(message: torch.Tensor, layout: Layout, whole: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each run of tokens of each place as a view of a message and as a view of a tensor, both (batch, heads, tokens of a run, width).

    Args:
        message: A row for each place, with the tokens that it holds of each of ``whole``, (places, n).
        layout: The division of sequences.
        whole: Tensors of whole sequences, (batch, heads, tokens, width); heads and widths may differ.
    """
    sizes = [tensor.numel() // message.shape[0] for tensor in whole]
    for tensor, rows in zip(whole, message.split(sizes, dim=1), strict=True):
        for place, row in enumerate(rows):
            halves = row.view(*tensor.shape[:2], 2, -1, tensor.shape[3]).unbind(2)
            for half, (first, end) in zip(halves, layout.parts(tensor.shape[2], place), strict=True):
                yield half, tensor[:, :, first:end]


class _Causal(torch.autograd.Function):
    """Causal attention of the two runs of a place to whole keys and values without a mask: each run sees the keys before it and, up to
    the query, its own ([Note: partial attention]).

    [Note: heads in turn] A kernel gets a key head for each query head and returns a gradient for each: copies and gradients of all heads
    at once would be several times the keys and values of whole sequences. So as many heads are computed at a time as ``_AT_ONCE_BYTES``
    hold; where not even the query heads of one key head fit, these read it without copies. Gradients of a key head are added up in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, runs: list[tuple[int, int]], scale: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        ctx.runs, ctx.scale, ctx.groups = runs, scale, query.shape[1] // key.shape[1]
        queries = query.unflatten(1, (-1, ctx.groups))
        out = torch.empty(*queries.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        lse: torch.Tensor | None = None
        for heads, turns in _heads_in_turn(key, value, ctx.groups, gradients=False):
            for turn in turns:
                keys, values = (_for_queries(part[:, heads], turn) for part in (key, value))
                found = []
                for part, (first, end) in zip(queries[:, heads, turn].flatten(1, 2).chunk(2, dim=2), runs, strict=True):
                    own = slice(first, end)
                    sums, logs = attend(part, keys[:, :, own], values[:, :, own], Scores(scale, causal=True))
                    if first:
                        merge(sums, logs, *attend(part, keys[:, :, :first], values[:, :, :first], Scores(scale)))
                    found.append((sums.to(query.dtype), logs))
                sums, logs = (torch.cat(parts, dim=2) for parts in zip(*found, strict=True))
                if lse is None:
                    lse = torch.empty(*queries.shape[:3], *logs.shape[2:], dtype=logs.dtype, device=logs.device)
                out[:, heads, turn] = sums.unflatten(1, (-1, turn.stop - turn.start))
                lse[:, heads, turn] = logs.unflatten(1, (-1, turn.stop - turn.start))
        attended = out.flatten(1, 2)
        ctx.save_for_backward(query, key, value, attended, lse)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        of_query, of_key, of_value = (torch.empty_like(given) for given in (query, key, value))
        queries, outs, incoming, of_queries = (given.unflatten(1, (-1, ctx.groups)) for given in (query, out, above, of_query))
        for heads, turns in _heads_in_turn(key, value, ctx.groups, gradients=True):
            sums = tuple(torch.zeros_like(given[:, heads], dtype=lse.dtype) for given in (key, value))
            for turn in turns:
                keys, values = (_for_queries(given[:, heads], turn) for given in (key, value))
                own = (given[:, heads, turn].flatten(1, 2) for given in (queries, outs, lse, incoming))
                found = _gradients_of_runs(ctx.runs, ctx.scale, sums, keys, values, *own)
                of_queries[:, heads, turn] = found.unflatten(1, (-1, turn.stop - turn.start))
            of_key[:, heads], of_value[:, heads] = sums
        return None, None, of_query, of_key, of_value


def _gradients_of_runs(
    runs: list[tuple[int, int]],
    scale: float,
    sums: tuple[torch.Tensor, ...],
    keys: torch.Tensor,
    values: torch.Tensor,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    above: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of queries, in the dtype of ``lse``, and add the gradients of keys and values to ``sums``.

    Args:
        runs: As ``_Causal``'s.
        scale: As ``_Causal``'s.
        sums: Gradients of keys and of values so far, (batch, key heads, tokens, width) in the dtype of ``lse``.
        keys: One head for each of ``query``; the heads that belong to a key head follow each other.
        values: As ``keys``.
        query: The queries of both runs, (batch, heads, tokens here, width).
        out: Their attention.
        lse: Its logarithms of sums.
        above: The gradient of ``out``.
    """
    of_query, heads = torch.zeros_like(query, dtype=lse.dtype), query.shape[1] // sums[0].shape[1]
    width = query.shape[2] // 2  # tokens of a run
    for turn, (first, end) in enumerate(runs):
        part = slice(turn * width, (turn + 1) * width)
        for columns, causal in ((slice(first, end), True), (slice(0, first), False)):
            if columns.stop == columns.start:
                continue
            given = query[:, :, part], keys[:, :, columns], values[:, :, columns], Scores(scale, causal=causal)
            found = gradients(*given, out[:, :, part], lse[:, :, part], above[:, :, part])
            of_query[:, :, part] += found[0]
            for total, gradient in zip(sums, found[1:], strict=True):
                added_to(total[:, :, columns], gradient, heads)
    return of_query


def _heads_in_turn(key: torch.Tensor, value: torch.Tensor, groups: int, gradients: bool) -> Iterator[tuple[slice, list[slice]]]:
    """Yield the key heads to compute together and, in turn, the query heads of each of them; see [Note: heads in turn].

    Args:
        key: (batch, key heads, tokens, width).
        value: As ``key``, maybe of another width.
        groups: Query heads that read one key head.
        gradients: Whether a kernel returns gradients of keys and values.
    """
    batch, heads, length, width = key.shape
    size = key.element_size() * batch * length * (width + value.shape[-1])  # bytes of one head of both
    copied, returned = size * (groups > 1), size * gradients  # for each query head
    step = _AT_ONCE_BYTES // max(1, (copied + returned) * groups)  # key heads whose query heads fit; 0 if those of one do not
    turn = groups if step else min(groups, max(1, _AT_ONCE_BYTES // max(1, returned)))
    turns = [slice(first, min(first + turn, groups)) for first in range(0, groups, turn)]
    for first in range(0, heads, max(1, step)):
        yield slice(first, min(first + max(1, step), heads)), turns


def _for_queries(tensor: torch.Tensor, turn: slice) -> torch.Tensor:
    """Return keys or values once for each query head of ``turn``; views where there is one key head."""
    count = turn.stop - turn.start
    return tensor.expand(-1, count, -1, -1) if tensor.shape[1] == 1 else tensor if count == 1 else tensor.repeat_interleave(count, 1)


def gather_keys(layout: Layout, across: Collectives, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of whole sequences, of which each place holds its part; differentiable, collective.

    Args:
        layout: The division of sequences.
        across: The ranks, one of each place.
        key: (batch, key heads, tokens here, width).
        value: As ``key``, maybe of another width.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _GatherKeys.apply(layout, across, key, value)  # type: ignore[no-untyped-call]
    return found


class ContextAttention(SlicedAttention):
    """Attention of one model's modules.

    Attributes:
        layout: The division of sequences.
        across: The ranks whose keys and values are gathered.
        inside: The ranks that exchange heads first; None without sequence parallelism.
    """

    def __init__(self, model: nn.Module, layout: Layout, across: Collectives, inside: Collectives | None) -> None:
        super().__init__(model, layout.collectives, reads_positions=False)
        self.layout = layout
        self.across = across
        self.inside = inside
        self._outside = outside_compile(self.attend)

    @property
    def run(self) -> Callable[..., tuple[torch.Tensor, None]]:
        """Return ``attend`` outside of graphs: the ring sends while it computes."""
        return self._outside

    def attend(
        self,
        core: Core,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Run ``core`` for this rank's queries; collective. Arguments and result as those of ``SlicedAttention.attend``.

        Args:
            core: The function of transformers that would have been called.
            module: The attention module.
            query: (batch, heads, tokens here, width); rotated by its positions already.
            key: (batch, key heads, tokens here, width).
            value: As ``key``, maybe of another width.
            attention_mask: This place's rows of the mask of whole sequences, as ``RowMasks`` has them made; or None.
            **kwargs: For ``core``.
        """
        self.called = True
        self._require_own(query, key, kwargs)
        kwargs.pop("position_ids", None)
        run = partial(self._of_place, core)
        if self.inside is None:
            return run(module, query, key, value, attention_mask, **kwargs), None
        return with_own_heads(self.inside, run, module, query, key, value, attention_mask, **kwargs), None

    def _of_place(
        self, core: Core, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return the attention of the queries of this place, (batch, tokens of the place, heads, width); collective."""
        key, value = gather_keys(self.layout, self.across, key, value)
        length = key.shape[2]
        is_causal = kwargs.pop("is_causal", None)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if isinstance(mask, torch.Tensor):
            require_rows(mask, query.shape[2], length)
            causal = mask in causal_rows
        else:
            causal = bool(is_causal)
        if not causal:
            return core(module, query, key, value, mask, is_causal=False, **kwargs)[0]
        scale = kwargs.get("scaling")
        plain = mask is None and not kwargs.get("dropout") and getattr(core, "__module__", None) == SDPA
        if plain and is_fused(query, value):
            scale = float(scale) if scale is not None else query.shape[-1] ** -0.5
            attended: torch.Tensor = _Causal.apply(self.layout.parts(length), scale, query, key, value)  # type: ignore[no-untyped-call]
            return attended.transpose(1, 2)
        found, width = [], query.shape[2] // 2
        for turn, (first, end) in enumerate(self.layout.parts(length)):
            rows = slice(turn * width, (turn + 1) * width)
            part = _before(first, end, query.device) if mask is None else mask[..., rows, :end]
            found.append(core(module, query[:, :, rows], key[:, :, :end], value[:, :, :end], part, is_causal=False, **kwargs)[0])
        return torch.cat(found, dim=1)

    def _require_own(self, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]) -> None:
        given = [name for name in _OF_SLICES if kwargs.get(name) is not None]
        if given:
            raise UnsupportedError(
                f"context parallelism: attention cannot use {', '.join(given)}: it needs whole sequences, and this rank has a part"
            )
        if key.shape[2] != query.shape[2]:
            raise UnsupportedError(
                f"context parallelism: a layer attends from {query.shape[2]} tokens to {key.shape[2]}; only attention of a sequence to "
                "itself can be divided"
            )


def _before(first: int, end: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask of the tokens ``first`` to ``end``, (1, 1, end - first, end)."""
    return torch.ones(end - first, end, dtype=torch.bool, device=device).tril(first)[None, None]


def require_rows(mask: torch.Tensor, queries: int, keys: int) -> None:
    """Refuse masks that are not of this place's rows."""
    if mask.dim() != 4 or mask.shape[-1] != keys or mask.shape[-2] not in (1, queries):
        raise UnsupportedError(
            f"context parallelism: the model made an attention mask of shape {tuple(mask.shape)} by itself, where {queries} rows of "
            f"{keys} tokens are needed; only models that make masks with transformers.masking_utils are supported"
        )
