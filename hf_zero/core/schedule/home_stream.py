"""The stream on which a backward's gradients are copied together and reduced, wherever they are computed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_STAYS = nullcontext()


class HomeStream:
    """The stream that was current when a backward began; nothing where training runs in host memory.

    [Note: one stream for gradients] autograd runs the backward of an operation on the stream of its forward, so a block that computes on
    several streams hands in gradients on several. They share one flat buffer, small ones are copied into it later than they
    arrive, and buffers go from unit to unit. So all of that happens on one stream, which waits for the stream of each gradient that came on
    another; the memory of that gradient is not given away before (``record_stream``: rare enough here for its price).

    Args:
        device: Where gradients are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device) if device.type != "cpu" else None
        self._stream: Any = None

    def begin(self) -> None:
        """A backward begins on the current stream, unless one runs already."""
        if self._module is not None and self._stream is None:
            self._stream = self._module.current_stream(self._device)

    def end(self) -> None:
        """It has ended: what follows on the current stream waits for what was done here."""
        stream, self._stream = self._stream, None
        if stream is not None and (current := self._module.current_stream(self._device)) != stream:
            current.wait_stream(stream)

    def entered(self, grad: torch.Tensor | None = None) -> AbstractContextManager[None]:
        """Return a context in which the current stream is this one. It waits for ``grad``, if one is given that comes on another stream."""
        if self._stream is None or (current := self._module.current_stream(self._device)) == self._stream:
            return _STAYS
        if grad is not None:
            self._stream.wait_stream(current)
            for part in (grad._indices(), grad._values()) if grad.is_sparse else (grad,):
                part.record_stream(self._stream)
        entered: AbstractContextManager[None] = self._module.stream(self._stream)
        return entered
