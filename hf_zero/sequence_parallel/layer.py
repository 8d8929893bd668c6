"""The classic Ulysses module: attention of any kind, wrapped so that its inputs and its output are slices of sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.topology import axis_over
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.sequence_parallel.exchange import all_to_all, key_heads, require_even_heads


class DistributedAttention(nn.Module):
    """Run ``local_attention`` on some heads of whole sequences. DeepSpeed's class of that name, with its arguments.

    Args:
        local_attention: Called with query, key and value that hold whole sequences and this rank's heads; its result has the
            query's layout.
        sequence_process_group: The ranks that hold slices of the same sequences.
        scatter_idx: Dimension of the heads.
        gather_idx: Dimension of the sequence.
        sp_stream: Must be None; an exchange is waited for where its result is read.
        num_kv_heads: Accepted; the key tensor has them.
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if sp_stream is not None:
            raise UnsupportedError("DistributedAttention(sp_stream=...): no separate stream for the exchange; remove the argument")
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx
        self.collectives: Collectives = open_collectives(axis_over(sequence_process_group))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Exchange heads, attend, and exchange back; collective.

        Args:
            query: All heads of this rank's slice, with heads and sequence at the dimensions the constructor was given.
            key: Likewise. Its heads may be fewer than the query's: each rank gets those that its query heads read, in their order.
            value: Likewise.
            batch_dim_idx: Accepted; every other dimension stays as it is.
            rotary_pos_emb: Refused unless None: rotate query and key by their positions before the call.
            *args: For ``local_attention``.
            **kwargs: For ``local_attention``.

        Returns:
            This rank's slice of what ``local_attention`` gives, with all heads.

        Raises:
            ConfigError: The group does not divide the heads.
        """
        if rotary_pos_emb is not None:
            raise UnsupportedError("DistributedAttention(rotary_pos_emb=...) is not provided: rotate query and key before the call")
        ranks = self.collectives.world
        dims = query.dim()
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != dims or not all(-dims <= dim < dims for dim in (self.scatter_idx, self.gather_idx)):
                raise ConfigError(
                    f"DistributedAttention: {name} has {tensor.dim()} dimensions, the query {dims}; heads are dimension {self.scatter_idx} "
                    f"(scatter_idx) and the sequence {self.gather_idx} (gather_idx)"
                )
        heads, sequence = self.scatter_idx % dims, self.gather_idx % dims
        require_even_heads(query.shape[heads], ranks, f"dimension {self.scatter_idx} of the query")
        plan = key_heads(query.shape[heads], key.shape[heads], ranks)
        if plan.sent is not None:
            sent = torch.tensor(plan.sent, device=key.device)
            key, value = key.index_select(heads, sent), value.index_select(heads, sent)
        rows = [_rows(tensor, heads, ranks) for tensor in (query, key, value)]
        whole = [_joined(part, sequence) for part in all_to_all(self.collectives, *rows)]
        output = self.local_attn(*whole, *args, **kwargs)
        (exchanged,) = all_to_all(self.collectives, _rows(output, sequence, ranks))
        return _joined(exchanged, heads)


def _rows(tensor: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """Return ``tensor`` cut into ``ranks`` parts along ``dim``, stacked: (ranks, ...)."""
    return tensor.unflatten(dim, (ranks, -1)).movedim(dim, 0)


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the opposite: ``parts`` (ranks, ...) one behind the other along ``dim``."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


class SeqAllToAll:
    """The exchange of heads for tokens alone, with DeepSpeed's name ``_SeqAllToAll`` and arguments."""

    @staticmethod
    def apply(
        group: dist.ProcessGroup, input: torch.Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int = 0, *args: Any
    ) -> torch.Tensor:
        """Divide ``input`` over the ranks of ``group`` at one dimension and join the received parts at another; collective, differentiable.

        Args:
            group: Divides the size of ``scatter_idx``.
            input: This rank's tensor.
            scatter_idx: Dimension that is divided.
            gather_idx: Dimension that is joined.
            batch_dim_idx: Accepted; every other dimension stays as it is.
            *args: Accepted: streams and handles of an asynchronous exchange.
        """
        collectives = open_collectives(axis_over(group))
        (rows,) = all_to_all(collectives, torch.stack(input.tensor_split(collectives.world, dim=scatter_idx)))
        return torch.cat(list(rows), dim=gather_idx)
