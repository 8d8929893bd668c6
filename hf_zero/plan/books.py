"""The books of a plan: every storage that comes and goes, what it is for, and where it lies.

[Note: a storage of a fake tensor] Under ``FakeTensorMode`` a tensor has a shape, a device and a storage of a size, without memory.
The engine frees whole units with ``storage.resize_(0)`` and tells tensors apart by their addresses, so both are served here: resizing is
written down, and every storage has an address of its own at which nothing is. What a kernel takes for itself and frees before it returns is
not seen. What a storage is for may be said after it has gone: kinds are read when the plan is drawn up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero import observe
from hf_zero.profiling.costs import COUNTED
from hf_zero.system.planning import place

NOWHERE = "nowhere"
"""The tier of what stands for values that come from elsewhere, piece by piece: weights before an engine has them."""

_ROUND = 512  # what a device's allocator rounds to
_FIRST_ADDRESS = 1 << 50  # where no process has memory
_COPY_TO = torch.ops.aten._to_copy.default
_GROUPED = torch.ops.aten._grouped_mm.default
_COPIES = (_COPY_TO, torch.ops.aten.copy_.default)
_DEVICE_OF = torch.ops.prim.device.default
_NUMBER_OF = torch.ops.aten._local_scalar_dense.default


@dataclass(eq=False)
class Storage:
    """One storage.

    Attributes:
        tier: Where it lies.
        kind: What it is for.
        phase: What the engine was doing when it came: forward, backward, step or "".
        label: The last thing that the engine had noted then.
        shape: Of the first tensor in it.
        dtype: Of that.
        address: At which nothing is.
        nbytes: Now.
    """

    tier: str
    kind: str
    phase: str
    label: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    address: int
    nbytes: int = 0
    reference: Any = None


@dataclass(frozen=True)
class Change:
    """A storage took or gave back memory.

    Attributes:
        storage: Which.
        nbytes: Bytes more, or less.
        label: What the engine was doing.
    """

    storage: Storage
    nbytes: int
    label: str


@dataclass
class Work:
    """What was computed and moved so far.

    Attributes:
        flops: Floating-point operations of matrix products, convolutions and attention.
        read: Bytes that other operations of the device read and wrote.
        moved: Bytes that were copied between the device and the host.
        operations: How many operations the device was given.
    """

    flops: int = 0
    read: int = 0
    moved: int = 0
    operations: int = 0

    def plus(self, other: Work, times: int = 1) -> Work:
        """Return the sum."""
        mine, theirs = astuple(self), astuple(other)
        return Work(*(one + times * two for one, two in zip(mine, theirs, strict=True)))


@dataclass
class Books(TorchDispatchMode):
    """Writes storages down while it is entered, above a ``FakeTensorMode``.

    Attributes:
        device: The training device.
        vocabulary: Tensors whose last dimension is this are logits; 0 where there is none.
        changes: All of them, in order.
        work: What was computed.
        purpose: The kind of what comes now; "" decides by phase and shape.
    """

    device: torch.device
    vocabulary: int = 0
    changes: list[Change] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    purpose: str = ""
    _storages: dict[int, Storage] = field(default_factory=dict)
    _next: int = _FIRST_ADDRESS
    _label: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    # -- what torch tells -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation on fake tensors and writes down what it leaves."""
        if func is _DEVICE_OF:
            return args[0].fake_device
        if func is _NUMBER_OF:
            return _number(args[0])
        kwargs = kwargs or {}
        if func is _COPY_TO:  # a known value would be copied to a device that is not there
            args[0].constant = None
        untold = func is _GROUPED and args[0].dtype is not torch.bfloat16
        result = _grouped(*args, **kwargs) if untold else func(*args, **kwargs)
        if isinstance(result, FakeTensor):
            self._see(result)
        elif isinstance(result, (list, tuple)):
            for part in result:
                if isinstance(part, FakeTensor):
                    self._see(part)
        self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = COUNTED.get(func._overloadpacket)
        if formula is not None:
            self.work.flops += formula(*args, **kwargs, out_val=result)
            self.work.operations += 1
        elif not func.is_view:
            tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, FakeTensor)]
            here = [value for value in tensors if value.fake_device.type == self.device.type]
            self.work.read += sum(value.numel() * value.element_size() for value in here)
            self.work.operations += bool(here)
            if func in _COPIES and 0 < len(here) < len(tensors):
                self.work.moved += max(value.numel() * value.element_size() for value in here)

    def _see(self, tensor: FakeTensor) -> None:
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key in self._storages or tensor.fake_device.type == "meta":
            return
        shape, dtype, nbytes = tuple(tensor.shape), tensor.dtype, memory.nbytes()
        tier = place() or ("device" if tensor.fake_device.type == self.device.type else "host")
        phase = observe.current_phase()
        entry = Storage(tier, self.purpose or self._kind(shape, phase), phase, self._label, shape, dtype, self._next)
        self._next += max(4096, -(-nbytes // 4096) * 4096) + 4096
        entry.reference = weakref.ref(memory, lambda _: self._gone(key))
        self._storages[key] = entry
        self._resized(entry, nbytes)

    def _kind(self, shape: tuple[int, ...], phase: str) -> str:
        if phase not in ("forward", "backward"):
            return "other"
        return "logits" if self.vocabulary and len(shape) > 1 and shape[-1] == self.vocabulary else "activations"

    def _gone(self, key: int) -> None:
        entry = self._storages.pop(key, None)
        if entry is not None:
            self._resized(entry, 0)

    def _resized(self, entry: Storage, nbytes: int) -> None:
        taken = -(-nbytes // _ROUND) * _ROUND if self.device.type != "cpu" and entry.tier != "host" else nbytes
        if taken != entry.nbytes:
            self.changes.append(Change(entry, taken - entry.nbytes, self._label))
            entry.nbytes = taken

    def noted(self, label: str) -> None:
        """The engine begins something."""
        self._label = label

    # -- what the plan tells ----------------------------------------------------------------------------------------------

    def of(self, tensor: torch.Tensor | None) -> Storage | None:
        """Return the storage of ``tensor``; None where it has none that was written down."""
        return self._storages.get(tensor.untyped_storage()._cdata) if isinstance(tensor, FakeTensor) else None

    def mark(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Says what the storages of ``tensors`` are for."""
        for tensor in tensors:
            entry = self.of(tensor)
            if entry is not None:
                entry.kind = kind

    @contextmanager
    def of_kind(self, kind: str) -> Iterator[None]:
        """What comes inside is ``kind``."""
        before, self.purpose = self.purpose, kind
        try:
            yield
        finally:
            self.purpose = before

    def booked(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, which allocates ``kind``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.of_kind(kind):
                return call(*args, **kwargs)

        return run

    # -- entering ---------------------------------------------------------------------------------------------------------

    def address_of(self, tensor: torch.Tensor) -> int:
        """What ``data_ptr`` says of a fake tensor."""
        entry = self.of(tensor)
        return entry.address + int(tensor.storage_offset()) * tensor.element_size() if entry is not None and tensor.numel() else 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, torch has fake tensors only, and the books are kept."""
        resize, address = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr

        def resized(memory: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(memory, nbytes)
            entry = self._storages.get(memory._cdata)
            if entry is not None:
                self._resized(entry, nbytes)
            return result

        def placed(memory: torch.UntypedStorage) -> int:
            entry = self._storages.get(memory._cdata)
            return address(memory) if entry is None else entry.address if memory.nbytes() else 0

        lifts = torch._C._only_lift_cpu_tensors()
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", placed))
            stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", lambda tensor: self.address_of(tensor), create=True))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=False))
            stack.enter_context(observe.told(self.noted))
            stack.enter_context(self)
            torch._C._set_only_lift_cpu_tensors(True)
            try:
                yield
            finally:
                torch._C._set_only_lift_cpu_tensors(lifts)


def _number(tensor: Any) -> Any:
    """What ``item()`` says: the value where it is a constant; else 1, which is finite, true, and the factor of nothing."""
    if tensor.constant is not None:
        with torch.utils._mode_utils.no_dispatch():
            return tensor.constant.item()
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _grouped(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    """What a grouped matrix product makes: torch tells it of bf16 alone, and computes other types on a CPU too."""
    groups = (offs.numel(),) if offs is not None and left.dim() == right.dim() == 2 else tuple(left.shape[:-2]) if right.dim() == 3 else ()
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]))
