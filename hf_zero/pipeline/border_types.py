"""Element types of the tensors that cross borders under ``torch.autocast``, where operations choose the types."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.comm.link import Link

_TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_LABEL = "types of activations"


class BorderTypes:
    """The types of the tensors of each border, for calls of one kind.

    [Note: types under autocast] A stage that does not run a module finds the shape of its result with a copy without values, where autocast
    has no effect. So the stage that has the tensors sends their types, as numbers, ahead of the first part of each kind.

    Attributes:
        sent: Calls of this kind run under autocast; otherwise no types are sent.
    """

    def __init__(self, sent: bool) -> None:
        self.sent = sent
        self._known: dict[int, list[torch.dtype]] = {}  # border -> types

    @property
    def known(self) -> bool:
        """Return whether the stages already know the types; the same on every rank."""
        return not self.sent or bool(self._known)

    def of(self, border: int, metas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``metas`` with the types of the tensors that crossed ``border``."""
        dtypes = self._known.get(border, [meta.dtype for meta in metas])
        return [torch.empty(meta.shape, dtype=dtype, device="meta") for meta, dtype in zip(metas, dtypes, strict=True)]

    def send(self, border: int, tensors: Sequence[torch.Tensor], link: Link, target: int) -> None:
        """Send the types of ``tensors`` ahead of the tensors themselves, once per border."""
        if not self.sent or border in self._known:
            return
        self._known[border] = [tensor.dtype for tensor in tensors]
        if tensors:
            numbers = torch.tensor([_TYPES.index(tensor.dtype) for tensor in tensors], device=tensors[0].device)
            link.send([numbers], target, _LABEL)

    def receive(self, border: int, metas: Sequence[torch.Tensor], link: Link, source: int) -> list[torch.Tensor]:
        """Return ``metas`` with the types in which rank ``source`` sends the tensors."""
        if not (self.sent and metas):
            return list(metas)
        if border not in self._known:
            numbers = link.receive([torch.empty(len(metas), dtype=torch.int64, device="meta")], source, _LABEL)[0]
            self._known[border] = [_TYPES[number] for number in numbers.tolist()]
        return self.of(border, metas)
