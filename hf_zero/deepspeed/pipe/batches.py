"""The parts of a batch that a pipeline trains on, as its stages see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import ConfigError, StateError
from hf_zero.pipeline.trees import map_tensors, without_values


@dataclass(frozen=True)
class MicroBatch:
    """One part.

    Attributes:
        inputs: A tensor or a tuple of tensors; None on stages that read no data.
        labels: What the loss function gets; None likewise.
    """

    inputs: Any = None
    labels: Any = None


class Feed:
    """Where an engine's micro-batches come from.

    Attributes:
        batches: The iterator that ``train_batch`` reads where it is given none.
        convert: A script's function of what an iterator gives; None leaves it as it is.
    """

    def __init__(self) -> None:
        self.batches: Iterator[Any] | None = None
        self.convert: Callable[[Any], Any] | None = None

    def take(self, given: Iterator[Any] | None, count: int, device: torch.device) -> list[MicroBatch]:
        """The next ``count`` of ``given``, or of ``batches``, on ``device``.

        Raises:
            ConfigError: What is given is no iterator, or an entry is no (inputs, labels).
            StateError: There is no data.
            StopIteration: There is not enough.
        """
        source = given if given is not None else self.batches
        if source is None:
            raise StateError(
                "this stage of the pipeline reads data and there is none: call train_batch(data_iter=...), or give initialize() "
                "training_data=, or call set_dataloader() or set_dataiterator() before"
            )
        if not isinstance(source, Iterator):
            raise ConfigError(f"data_iter is a {type(source).__name__}; an iterator is allowed, iter(loader) for example")
        return [self._micro_batch(next(source), device) for _ in range(count)]

    def _micro_batch(self, entry: Any, device: torch.device) -> MicroBatch:
        entry = self.convert(entry) if self.convert is not None else entry
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            shown = f"{type(entry).__name__} of {len(entry)}" if isinstance(entry, (tuple, list, dict)) else type(entry).__name__
            raise ConfigError(
                f"data_iter gave a {shown}; (inputs, labels) is allowed, each a tensor or a tuple of tensors. "
                "engine.set_batch_fn(function) sets what makes that of each entry"
            )
        inputs, labels = (tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), item) for item in entry)
        return MicroBatch(tuple(inputs) if isinstance(inputs, list) else inputs, labels)


def agree(pipe: Collectives, read: Callable[[], list[MicroBatch]]) -> tuple[list[MicroBatch], list[str]]:
    """This stage's micro-batches, and the kinds of their inputs; collective over the stages, of which none goes on without the others.

    Args:
        pipe: The stages.
        read: Gives this stage's.

    Raises:
        StopIteration: On every stage, if data ended on one.
        StateError: On the others, if a stage failed to read for another reason, which is raised there.
    """
    parts: list[MicroBatch] = []
    failure: Exception | None = None
    try:
        parts = read()
    except Exception as error:  # also what a data set raises
        failure = error
    told = (
        [kind_of(part.inputs) for part in parts],
        failure and (isinstance(failure, StopIteration), f"{type(failure).__name__}: {failure}"),
    )
    answers = pipe.gather_objects(told, "kinds of inputs")
    if failure is not None:
        raise failure
    for stage, (_, failed) in enumerate(answers):
        if failed:
            text = f"stage {stage} of the pipeline has no micro-batches for this batch: {failed[1]}"
            raise StopIteration(text) if failed[0] else StateError(text)
    return parts, answers[0][0]


def kind_of(inputs: Any) -> Any:
    """Shapes and types of ``inputs``, as something that can be sent and compared."""
    shape = map_tensors(inputs, without_values)
    return repr(tree_map_only(torch.Tensor, lambda tensor: (tuple(tensor.shape), str(tensor.dtype)), shape))
