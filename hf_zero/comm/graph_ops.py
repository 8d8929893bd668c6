"""Collectives as operations of torch, so that a graph of torch.compile can contain them.

[Note: collectives in graphs] torch.compile cannot follow the code that sends, and would break a graph at every collective between the
layers of a block. Here each collective is one operation that the graph calls as it is, with its wait. The graphs of ranks that share a
block are compiled from the same code for the same shapes, so their operations have one order, and the backward of a graph has the reverse
one. An operation names its network by the number of the process group, because a graph holds numbers and tensors only; a new engine over
the same group uses the same graphs. All layers pass one label, ``GRAPH``: a label of each layer's own would make each layer another graph.
"""

from __future__ import annotations

import torch

from hf_zero.comm.collectives import Collectives, newest_network
from hf_zero.errors import StateError

GRAPH = "compiled block"  # label of what graphs send


def in_graph() -> bool:
    """Return whether torch.compile is reading the calling code to make a graph."""
    return torch.compiler.is_compiling()


def _network(number: int) -> Collectives:
    found = newest_network(number)
    if found is None:
        raise StateError(
            "a compiled graph contains a collective of an engine that is gone: compile the modules again after the model was given to a "
            "new engine"
        )
    return found


@torch.library.custom_op("hf_zero::sum_over_ranks", mutates_args=())
def sum_over_ranks(tensor: torch.Tensor, network: int) -> torch.Tensor:
    """Return the sum of every rank's ``tensor``, a new tensor."""
    total = tensor.contiguous().clone()
    _network(network).all_reduce(total, GRAPH).wait()
    return total


@sum_over_ranks.register_fake
def _(tensor: torch.Tensor, network: int) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op("hf_zero::gather_from_ranks", mutates_args=())
def gather_from_ranks(tensor: torch.Tensor, network: int, world: int) -> torch.Tensor:
    """Return every rank's ``tensor`` (all of one shape), stacked: (ranks, ...)."""
    part = tensor.contiguous()
    full = torch.empty((world, *part.shape), dtype=part.dtype, device=part.device)
    _network(network).all_gather(full.view(-1), part.view(-1), GRAPH).wait()
    return full


@gather_from_ranks.register_fake
def _(tensor: torch.Tensor, network: int, world: int) -> torch.Tensor:
    return tensor.new_empty((world, *tensor.shape))


@torch.library.custom_op("hf_zero::exchange_rows", mutates_args=())
def exchange_rows(messages: torch.Tensor, network: int) -> torch.Tensor:
    """Send row ``r`` of ``messages`` (ranks, n) to rank ``r``; return the rows from all ranks."""
    received = _network(network).exchange(messages.contiguous(), GRAPH).received()
    return received.clone() if received.untyped_storage().data_ptr() == messages.untyped_storage().data_ptr() else received


@exchange_rows.register_fake
def _(messages: torch.Tensor, network: int) -> torch.Tensor:
    return torch.empty_like(messages, memory_format=torch.contiguous_format)
