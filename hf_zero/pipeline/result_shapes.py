"""What the results of the last stage look like, on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.comm.collectives import Collectives
from hf_zero.pipeline.trees import map_tensors, without_values


class ResultShapes:
    """Results without values, by what the model was called with; sent when they are new, else a vote says that they are as before.

    A result may have another shape with each batch, whatever the arguments are; so that ranks go on together, the last stage always says
    whether it has.

    Args:
        pipe: The ranks of the pipeline.
        source: Which of them has the last stage.
    """

    def __init__(self, pipe: Collectives, source: int) -> None:
        self._pipe = pipe
        self._source = source
        self._known: dict[str, Any] = {}

    def agree(self, given: Mapping[str, Any], result: Any, more: Any = None) -> tuple[Any, Any]:
        """The last stage's ``result`` with tensors on the device "meta", and its ``more``, on every rank; collective.

        Args:
            given: Arguments of the model, of the same shapes everywhere.
            result: Here, where the last stage is.
            more: Something small beside it.
        """
        here, key = self._pipe.rank == self._source, _described(given)
        own = (map_tensors(result, without_values), more) if here else None
        known = self._known.get(key)
        if known is None or self._pipe.any_rank(here and _described(own) != _described(known), "other results"):
            self._known[key] = known = self._pipe.broadcast_object(own, self._source, "shape of the result")
        return known  # type: ignore[no-any-return]


def _described(tree: Any) -> str:
    return repr(map_tensors(tree, lambda tensor: (tuple(tensor.shape), tensor.dtype)))
