"""Exchange all heads of a slice of each sequence for some heads of whole sequences, and back.

Source of the scheme: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509. Each exchange is one all-to-all; its gradient
is the same exchange of gradients. The heads of a rank follow from its position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.graph_ops import exchange_rows, gather_from_ranks, in_graph
from hf_zero.errors import ConfigError


@dataclass(frozen=True)
class KeyHeads:
    """Way in which key and value heads reach the ranks that hold the query heads.

    Attributes:
        sent: The key heads in the order they are sent, as many for each rank; None where that is the model's own order.
        queries_per_key: Query heads that read one key head, on every rank.
    """

    sent: tuple[int, ...] | None
    queries_per_key: int


def require_even_heads(heads: int, ranks: int, name: str = "num_attention_heads", otherwise: str = "") -> None:
    """Refuse a number of heads that the ranks cannot divide evenly: each rank computes the same number of query heads.

    Args:
        heads: Number of query heads.
        ranks: Number of ranks that exchange heads for tokens.
        name: Source of the number of heads, for the message.
        otherwise: End of the message: an alternative for this number of heads.

    Raises:
        ConfigError: ``ranks`` does not divide ``heads``.
    """
    if heads % ranks:
        usable = ", ".join(str(found) for found in range(1, heads + 1) if heads % found == 0)
        raise ConfigError(
            f"sequence parallelism: {ranks} ranks cannot divide the model's {heads} attention heads ({name}) evenly; allowed numbers of "
            f"ranks: {usable}{otherwise}"
        )


def exchangeable(query_heads: int, key_heads: int, ranks: int) -> bool:
    """Return whether ``ranks`` can exchange these heads."""
    return query_heads % ranks == 0 and query_heads % key_heads == 0


def key_heads(query_heads: int, key_heads: int, ranks: int) -> KeyHeads:
    """Return the key heads that each rank needs for its ``query_heads / ranks`` query heads.

    With fewer key heads than ranks, or where a rank's query heads end in the middle of a group, a key head goes to several ranks.

    Args:
        query_heads: Query heads of the layer.
        key_heads: Key and value heads of the layer; they divide the query heads.
        ranks: Size of the sequence-parallel group.

    Raises:
        ConfigError: ``ranks`` does not divide ``query_heads``, or ``key_heads`` does not.
    """
    require_even_heads(query_heads, ranks)
    if query_heads % key_heads:
        raise ConfigError(f"{query_heads} query heads cannot share {key_heads} key heads evenly")
    own, group = query_heads // ranks, query_heads // key_heads
    if own % group == 0:
        return KeyHeads(None, group)
    if group % own == 0:
        return KeyHeads(tuple(rank * own // group for rank in range(ranks)), own)
    return KeyHeads(tuple(head // group for head in range(query_heads)), 1)


class _Trade(torch.autograd.Function):
    """Row ``r`` of every tensor goes to rank ``r``; the row from rank ``r`` takes its place."""

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.collectives = collectives
        return _all_to_all(collectives, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return None, *all_to_all(ctx.collectives, *gradients)  # [Note: derivatives of collectives]


def _all_to_all(collectives: Collectives, rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Exchange all tensors in one message: several messages would need an order that autograd does not guarantee."""
    dtype = rows[0].dtype if len({row.dtype for row in rows}) == 1 else torch.uint8
    sizes = [row[0].numel() * (row.element_size() // dtype.itemsize) for row in rows]
    message = torch.empty(collectives.world, sum(sizes), dtype=dtype, device=rows[0].device)
    for row, place in zip(rows, message.split(sizes, dim=1), strict=True):
        values = row if row.dtype == dtype else row.contiguous().view(dtype)
        place.view(values.shape).copy_(values)
    received = exchange_rows(message, collectives.number) if in_graph() else collectives.exchange(message, "heads").received()
    return tuple(
        (part if row.dtype == dtype else part.contiguous().view(row.dtype)).view(row.shape)
        for row, part in zip(rows, received.split(sizes, dim=1), strict=True)
    )


def all_to_all(collectives: Collectives, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Send row ``r`` of each tensor (ranks, ...) to rank ``r`` of the group and return the received rows; differentiable."""
    exchanged: tuple[torch.Tensor, ...] = _Trade.apply(collectives, *rows)  # type: ignore[no-untyped-call]
    return exchanged


def heads_for_sequences(
    collectives: Collectives, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Exchange all heads of a slice for some heads of whole sequences; collective.

    Args:
        collectives: The sequence-parallel group.
        query: All heads of this rank's slice, (batch, query heads, slice, width).
        key: (batch, key heads, slice, width); its slice may be of another length than the query's.
        value: As ``key``, maybe of another width.

    Returns:
        The three as (batch, this rank's heads, whole sequence, width), and how many query heads read one key head.

    Raises:
        ConfigError: The group does not divide the query heads.
    """
    ranks = collectives.world
    plan = key_heads(query.shape[1], key.shape[1], ranks)
    if plan.sent is not None:
        sent = torch.tensor(plan.sent, device=key.device)
        key, value = key.index_select(1, sent), value.index_select(1, sent)
    rows = [tensor.unflatten(1, (ranks, -1)).transpose(0, 1) for tensor in (query, key, value)]  # (ranks, batch, heads, slice, width)
    query, key, value = (part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in all_to_all(collectives, *rows))
    return query, key, value, plan.queries_per_key


def sequences_for_heads(collectives: Collectives, output: torch.Tensor) -> torch.Tensor:
    """Undo ``heads_for_sequences``: return all heads of this rank's slice of the attention's result; collective.

    Args:
        collectives: The sequence-parallel group.
        output: (batch, whole sequence, this rank's heads, width).

    Returns:
        (batch, slice, heads, width).
    """
    rows = output.unflatten(1, (collectives.world, -1)).transpose(0, 1)  # (ranks, batch, slice, heads here, width)
    (exchanged,) = all_to_all(collectives, rows)
    return exchanged.permute(1, 2, 0, 3, 4).flatten(2, 3)


def join_slices(collectives: Collectives, tensor: torch.Tensor, dim: int, what: str) -> torch.Tensor:
    """Return the whole of a tensor of which each rank holds a slice along ``dim``, without gradient; collective.

    Args:
        collectives: The sequence-parallel group.
        tensor: This rank's slice, of one shape on all ranks.
        dim: The sequence's dimension.
        what: Name for labels.
    """
    slice_ = tensor.detach().contiguous()
    values = slice_.view(torch.uint8) if slice_.dtype == torch.bool else slice_
    if in_graph():
        whole = gather_from_ranks(values, collectives.number, collectives.world)
    else:
        whole = torch.empty((collectives.world, *values.shape), dtype=values.dtype, device=values.device)
        collectives.all_gather(whole.view(-1), values.view(-1), what).wait()
    dim %= tensor.dim()
    return whole.movedim(0, dim).flatten(dim, dim + 1).to(tensor.dtype)
