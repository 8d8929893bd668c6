"""`RepeatingLoader` for scripts that count steps instead of epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class RepeatingLoader:
    """Starts ``loader`` again whenever it ends; every pass counts as an epoch for a sampler that wants to know (``set_epoch``).

    Args:
        loader: Anything that can be iterated several times and is not empty.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self.epoch += 1
            set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
            self._batches = iter(self.loader)
            return next(self._batches)
