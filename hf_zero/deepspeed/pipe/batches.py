"""Read the micro-batches that a pipeline trains on, on the stages that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import ConfigError, StateError
from hf_zero.pipeline.train import read_together, require_iterator
from hf_zero.system.trees import map_tensors, without_values


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch.

    Attributes:
        inputs: A tensor or a tuple of tensors; None on stages that read no data.
        labels: Labels for the loss function; None on stages that read no data.
    """

    inputs: Any = None
    labels: Any = None


class Feed:
    """The source of an engine's micro-batches.

    Attributes:
        batches: The iterator that ``train_batch`` reads if it gets none as argument.
        convert: Function of the script that converts an entry of an iterator to (inputs, labels); None uses the entry unchanged.
    """

    def __init__(self) -> None:
        self.batches: Iterator[Any] | None = None
        self.convert: Callable[[Any], Any] | None = None

    def take(self, given: Iterator[Any] | None, count: int, device: torch.device) -> list[MicroBatch]:
        """Return the next ``count`` micro-batches of ``given``, or of ``batches``, on ``device``.

        Raises:
            ConfigError: ``given`` is not an iterator, or an entry is not (inputs, labels).
            StateError: There is no iterator to read.
            StopIteration: The iterator has fewer entries.
        """
        source = given if given is not None else self.batches
        if source is None:
            raise StateError(
                "this stage of the pipeline reads data, but there is no iterator: call train_batch(data_iter=...), pass training_data= "
                "to initialize(), or call set_dataloader() or set_dataiterator() first"
            )
        batches = require_iterator(source)
        return [self._micro_batch(next(batches), device) for _ in range(count)]

    def _micro_batch(self, entry: Any, device: torch.device) -> MicroBatch:
        entry = self.convert(entry) if self.convert is not None else entry
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            shown = f"{type(entry).__name__} of {len(entry)}" if isinstance(entry, (tuple, list, dict)) else type(entry).__name__
            raise ConfigError(
                f"data_iter gave a {shown}; allowed is (inputs, labels), each a tensor or a tuple of tensors. Otherwise pass a "
                "function that converts an entry of your loader to that form to engine.set_batch_fn(function)"
            )
        inputs, labels = (tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), item) for item in entry)
        return MicroBatch(tuple(inputs) if isinstance(inputs, list) else inputs, labels)


def agree(networks: Sequence[Collectives], read: Callable[[], list[MicroBatch]]) -> tuple[list[MicroBatch], list[str]]:
    """Read this stage's micro-batches; return them and the kinds (shapes and types) of the first stage's inputs; collective.

    Args:
        networks: Collectives of the ranks that must all succeed, the network of the stages first.
        read: Function that reads this stage's micro-batches.

    Raises:
        StopIteration: On every rank, if the data of one rank ended.
        StateError: On the other ranks, if one rank failed to read for another reason; that rank raises its own error.
    """
    parts, kinds = read_together(networks, read, lambda parts: [kind_of(part.inputs) for part in parts])
    return parts, kinds[0]


def kind_of(inputs: Any) -> Any:
    """Return the shapes and types of ``inputs`` as a hashable value that can be sent and compared."""
    shape = map_tensors(inputs, without_values)
    return repr(tree_map_only(torch.Tensor, lambda tensor: (tuple(tensor.shape), str(tensor.dtype)), shape))
