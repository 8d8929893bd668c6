"""The parts of a batch that a pipeline trains on, as its stages see them."""

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
    """One part.

    Attributes:
        inputs: A tensor or a tuple of tensors; None on stages that read no data.
        labels: Labels for the loss function; None likewise.
    """

    inputs: Any = None
    labels: Any = None


class Feed:
    """Source of an engine's micro-batches.

    Attributes:
        batches: The iterator that ``train_batch`` reads where it is given none.
        convert: A script's function of what an iterator gives; None leaves it as it is.
    """

    def __init__(self) -> None:
        self.batches: Iterator[Any] | None = None
        self.convert: Callable[[Any], Any] | None = None

    def take(self, given: Iterator[Any] | None, count: int, device: torch.device) -> list[MicroBatch]:
        """Return the next ``count`` of ``given``, or of ``batches``, on ``device``.

        Raises:
            ConfigError: The argument is no iterator, or an entry is no (inputs, labels).
            StateError: There is no data.
            StopIteration: There is not enough.
        """
        source = given if given is not None else self.batches
        if source is None:
            raise StateError(
                "this stage of the pipeline reads data and there is none: call train_batch(data_iter=...), or give initialize() "
                "training_data=, or call set_dataloader() or set_dataiterator() before"
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
    """Return this stage's micro-batches, and the kinds of the first stage's inputs; collective over the ``networks``, that of the stages
    first.

    Args:
        networks: None of whose ranks goes on without the others.
        read: Gives this stage's.

    Raises:
        StopIteration: On every rank, if data ended on one.
        StateError: On the others, if a rank failed to read for another reason, which is raised there.
    """
    parts, kinds = read_together(networks, read, lambda parts: [kind_of(part.inputs) for part in parts])
    return parts, kinds[0]


def kind_of(inputs: Any) -> Any:
    """Return shapes and types of ``inputs``, in a form that can be sent and compared."""
    shape = map_tensors(inputs, without_values)
    return repr(tree_map_only(torch.Tensor, lambda tensor: (tuple(tensor.shape), str(tensor.dtype)), shape))
