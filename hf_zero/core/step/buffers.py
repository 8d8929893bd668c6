"""Send rank 0's values of buffers that training writes to all ranks, once per step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.checksums import checksum, windows
from hf_zero.core.units.marks import has_own_buffers
from hf_zero.observe import log_rank0, span
from hf_zero.system.sizes import size_text

FOUND = 1  # this rank has found buffers that are written, or that have changed their shape
KEPT = 2  # the script wants each rank to keep its own buffers
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute of a module: names that DistributedDataParallel leaves alone
_DIGEST = 0xFFFFFF  # a vote compares numbers of 24 bits
_LARGE = 1 << 24  # bytes; of larger buffers (packed weights) a look reads windows alone
_WINDOWS, _WINDOW = 64, 4096  # number and size (elements) of these windows

Form = tuple[torch.Size, torch.dtype]


@dataclass
class _Watched:
    """A persistent buffer, and its state when it was last looked at.

    Attributes:
        buffers: Dictionary of the module that holds it.
        key: Its name in this dictionary.
        tensor: The tensor at the last look; None before the first.
        version: Its count of writes in place.
        sum: Its checksum; -1 before the first look.
    """

    buffers: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor | None = None
    version: int = 0
    sum: int = -1

    def look(self) -> None:
        """Record the buffer's present state."""
        self.tensor = self.buffers.get(self.key)
        if self.tensor is not None and _form(self.tensor) is not None:
            self.version, self.sum = self.tensor._version, _sum(self.tensor)

    def is_written(self, reads: bool) -> bool:
        """Return whether the value has changed since the last look; ``reads`` also finds writes that torch does not count.

        Values of large buffers are not compared, and only ``reads`` looks at them: ranks then compare values with each other.
        """
        now = self.buffers.get(self.key)
        form = _form(now)
        if now is None or form is None or (not reads and (_is_large(form) or (now is self.tensor and now._version == self.version))):
            return False
        before, counted = self.sum, now is not self.tensor or now._version != self.version
        self.look()
        return self.sum != before or (counted and _is_large(form))


class WrittenBuffers:
    """The buffers of a model that training writes.

    [Note: written buffers] Running statistics, codebooks and queues of negatives are buffers that each rank updates from its own batches.
    DistributedDataParallel sends all buffers of rank 0 before the first forward of each step. Most buffers never change, so here every rank
    looks for those that do: it compares the counts of writes in place in each step, and checksums in the steps 1, 2, 4, 8 and so on,
    because torch does not count writes through ``.data``. Whether some rank has found new ones travels in the vote of the step, and only
    then the ranks exchange names. From this step on, all ranks get rank 0's values of these buffers at the end of every step, in one
    message.

    Large buffers (packed weights, averages of a whole model) are looked at only in the steps 1, 2, 4, 8 and so on, in windows, and are sent
    if their values then differ between ranks.

    Each rank keeps its own buffers if they are not persistent (caches, and states of its own batch), belong to experts that other ranks do
    not hold, have other shapes on other ranks, or are named in ``module._ddp_params_and_buffers_to_ignore``.

    Attributes:
        kept: Whether the script wants each rank to keep its own buffers; nothing is sent if it does on any rank.

    Args:
        module: The user's module; all ranks have the same buffers now.
        data: Network of the data-parallel ranks.
    """

    def __init__(self, module: nn.Module, data: Collectives) -> None:
        self.kept = False
        self._module, self._data = module, data
        self._alone = data.world == 1 or data.pretended
        self._steps = 0
        self._watched: dict[str, _Watched] = {}
        self._sent: dict[str, Form] = {}  # the buffers that every step sends
        self._found: set[str] = set()
        if not self._alone:
            self._collect()
            for entry in self._watched.values():
                entry.look()

    def news(self) -> int:
        """Look at the buffers; return ``FOUND``, ``KEPT`` or 0, of which the largest of all ranks counts; local."""
        if self._alone:
            return 0
        if self.kept:
            return KEPT
        reads = self._steps & (self._steps + 1) == 0  # the number of the coming step is a power of two
        if reads:
            self._collect()
        for name, entry in self._watched.items():
            form = self._sent.get(name)
            if entry.is_written(reads) if form is None else _form(entry.buffers.get(entry.key)) != form:
                self._found.add(name)
        return FOUND if self._found else 0

    def send(self, news: int) -> None:
        """End a step: give all ranks rank 0's values of the buffers that training writes; collective.

        Args:
            news: The largest ``news`` of all ranks.
        """
        self._steps += 1
        if self._alone or news == KEPT:
            return
        if news:
            self._agree()
        tensors = [tensor for name in self._sent if (tensor := self._tensor(name)) is not None]
        if tensors:
            with span("buffers"):
                _broadcast(tensors, self._data)

    def _collect(self) -> None:
        """Find the persistent buffers of the model that are not watched yet, also those of modules that replace others; local."""
        ignored = set(getattr(self._module, _IGNORED, ()))
        apart: tuple[str, ...] = ()
        for path, module in self._module.named_modules():
            if has_own_buffers(module):
                apart = (*apart, f"{path}.")
            plain = isinstance(module._buffers, dict)  # a module that torch.jit has made shows its tensors in a list
            buffers = module._buffers if plain else dict(module._buffers.items())
            for key in buffers.keys() - module._non_persistent_buffers_set:
                name = f"{path}.{key}" if path else key
                known = self._watched.get(name)
                if known is not None and (known.buffers is buffers or not plain):
                    continue
                if name not in ignored and not name.startswith(apart):
                    self._watched[name] = _Watched(buffers, key)

    def _agree(self) -> None:
        """Agree on the buffers that every step sends: all that some rank has found, if they have one shape and dtype; collective."""
        found = self._data.gather_objects(sorted(self._found), "buffers that training writes")
        names = sorted({*self._sent, *(name for theirs in found for name in theirs)})
        forms = {name: _form(self._tensor(name)) for name in names}
        digests = [0 if form is None else _digest(form) for form in forms.values()]
        values = [self._digest_of_large(name, form) for name, form in forms.items()]
        most = self._data.largest_of([sign * one for sign in (1, -1) for one in (*digests, *values)], "buffers that training writes")
        same = [high == -low for high, low in zip(most[: len(most) // 2], most[len(most) // 2 :], strict=True)]
        before, self._sent = self._sent, {}
        for name, form, alike, equal in zip(names, forms.values(), same[: len(names)], same[len(names) :], strict=True):
            if alike and form is not None and (name in before or not (equal and _is_large(form))):
                self._sent[name] = form
        for name in {name for name, alike in zip(names, same, strict=False) if not alike}:
            self._watched.pop(name, None)
        self._found.clear()
        if new := [name for name in self._sent if name not in before]:
            total = sum(tensor.nbytes for name in self._sent if (tensor := self._tensor(name)) is not None)
            more = f" and {len(new) - 3} more" if len(new) > 3 else ""
            log_rank0(
                "training writes the buffers %s%s: after each step all ranks get rank 0's values, as with DistributedDataParallel "
                "(%s in all per step)",
                ", ".join(new[:3]),
                more,
                size_text(total),
            )

    def _digest_of_large(self, name: str, form: Form | None) -> int:
        """Return a digest of the values of a large buffer that is not sent yet; 0 for others."""
        tensor = self._tensor(name)
        return 0 if tensor is None or form is None or name in self._sent or not _is_large(form) else checksum(tensor) & _DIGEST

    def _tensor(self, name: str) -> torch.Tensor | None:
        entry = self._watched.get(name)
        return None if entry is None else entry.buffers.get(entry.key)


def _form(buffer: torch.Tensor | None) -> Form | None:
    """Return shape and dtype of a buffer; None if it has no plain values that can be read and written."""
    if buffer is None or type(buffer) not in (torch.Tensor, nn.Parameter) or buffer.is_meta or buffer.is_inference():
        return None
    if buffer.layout != torch.strided:
        return None
    return (buffer.shape, buffer.dtype) if buffer.numel() else None


def _is_large(form: Form) -> bool:
    return form[0].numel() * form[1].itemsize > _LARGE


def _sum(buffer: torch.Tensor) -> int:
    """Return a checksum of the values of a buffer, or of windows of a large one."""
    if not _is_large((buffer.shape, buffer.dtype)) or not buffer.is_contiguous():
        return checksum(buffer)
    return checksum(windows(buffer.detach().view(-1), _WINDOWS, _WINDOW))


def _digest(form: Form) -> int:
    """Return a digest above 0 of a shape and a dtype."""
    return (zlib.crc32(f"{tuple(form[0])} {form[1]}".encode()) & _DIGEST) or 1


def without_repeats(buffer: torch.Tensor) -> torch.Tensor:
    """Return a view of ``buffer`` without the elements that an expanded tensor repeats, which cannot be written one by one."""
    return buffer.data[tuple(0 if stride == 0 else slice(None) for stride in buffer.stride())]


def _broadcast(buffers: Sequence[torch.Tensor], data: Collectives) -> None:
    """Copy rank 0's values of ``buffers`` to all ranks as bytes, in one message; collective.

    As in DistributedDataParallel the copies do not count as writes in place, which autograd would refuse in a graph that is still used.
    """
    device = data.topology.device
    wholes = sorted(map(without_repeats, buffers), key=torch.Tensor.element_size, reverse=True)  # so that each part is aligned
    parts = [whole.contiguous().view(-1).view(torch.uint8).to(device) for whole in wholes]
    message = torch.cat(parts)
    data.broadcast(message, 0, "buffers")
    if data.rank:
        for whole, values in zip(wholes, message.split([len(part) for part in parts]), strict=True):
            whole.copy_(values.view(whole.dtype).view(whole.shape))
