"""Record every storage that a planned step allocates and frees, with its purpose and its tier.

[Note: a storage of a fake tensor] Under ``FakeTensorMode`` a tensor has a shape, a device and a storage with a size, but no memory. The
engine frees whole units with ``storage.resize_(0)`` and identifies tensors by their addresses, so the recorder supports both: it records
each resize, and gives every storage a unique address where no memory is. It does not see work space that a kernel allocates and frees
before it returns. The purpose of a storage may be set after the storage was freed, because kinds are read only when the plan is evaluated.
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
"""Tier of tensors that are counted nowhere: the model's weights before an engine takes them, which a run loads piece by piece."""

_ROUND = 512  # bytes to whose multiples a device's allocator rounds
_FIRST_ADDRESS = 1 << 50  # above the memory of every process
_COPY_TO = torch.ops.aten._to_copy.default
_GROUPED = torch.ops.aten._grouped_mm.default
_COPIES = (_COPY_TO, torch.ops.aten.copy_.default)
_DEVICE_OF = torch.ops.prim.device.default
_NUMBER_OF = torch.ops.aten._local_scalar_dense.default


@dataclass(eq=False)
class Storage:
    """One storage of fake tensors.

    Attributes:
        tier: The tier it is in: device, host, disk or ``NOWHERE``.
        kind: Its purpose, one of ``core.holdings.KINDS``.
        phase: Phase of the engine at the allocation: forward, backward, step or "".
        label: The engine's last note before the allocation.
        shape: Shape of the first tensor in the storage.
        dtype: Dtype of this tensor.
        address: A unique address, where no memory is.
        nbytes: Present size in bytes; on devices, rounded up like their allocator does.
        reference: Weak reference to torch's storage; records the release.
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
    """One allocation or release of memory by a storage.

    Attributes:
        storage: The storage.
        nbytes: Bytes allocated; negative if released.
        label: The engine's last note before the change.
    """

    storage: Storage
    nbytes: int
    label: str


@dataclass
class Work:
    """Amounts of computation and of copied bytes.

    Attributes:
        flops: Floating-point operations of matrix products, convolutions and attention.
        read: Bytes that other operations of the device read and wrote.
        moved: Bytes that were copied between the device and the host.
        operations: Number of operations that the device ran.
    """

    flops: int = 0
    read: int = 0
    moved: int = 0
    operations: int = 0

    def plus(self, other: Work, times: int = 1) -> Work:
        """Return the sum of this work and ``times`` times ``other``."""
        mine, theirs = astuple(self), astuple(other)
        return Work(*(one + times * two for one, two in zip(mine, theirs, strict=True)))


@dataclass
class StorageRecorder(TorchDispatchMode):
    """Dispatch mode that records storages while it is entered above a ``FakeTensorMode``.

    Attributes:
        device: The training device.
        vocabulary: Size of the vocabulary; tensors with this last dimension count as logits. 0 if the model has none.
        changes: All allocations and releases, in order.
        work: Computation and copies so far.
        current_kind: Kind of storages that are allocated now; "" derives it from phase and shape.
    """

    device: torch.device
    vocabulary: int = 0
    changes: list[Change] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    current_kind: str = ""
    _storages: dict[int, Storage] = field(default_factory=dict)
    _next: int = _FIRST_ADDRESS
    _label: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    # -- called by torch --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on fake tensors, and record the storages and the work of its result."""
        if func is _DEVICE_OF:
            return args[0].fake_device
        if func is _NUMBER_OF:
            return _item(args[0])
        kwargs = kwargs or {}
        if func is _COPY_TO:  # torch would copy a known value to a device that does not exist
            args[0].constant = None
        unsupported = func is _GROUPED and args[0].dtype is not torch.bfloat16
        result = _grouped_product(*args, **kwargs) if unsupported else func(*args, **kwargs)
        if isinstance(result, FakeTensor):
            self._record(result)
        elif isinstance(result, (list, tuple)):
            for part in result:
                if isinstance(part, FakeTensor):
                    self._record(part)
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

    def _record(self, tensor: FakeTensor) -> None:
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key in self._storages or tensor.fake_device.type == "meta":
            return
        shape, dtype, nbytes = tuple(tensor.shape), tensor.dtype, memory.nbytes()
        tier = place() or ("device" if tensor.fake_device.type == self.device.type else "host")
        phase = observe.current_phase()
        entry = Storage(tier, self.current_kind or self._kind(shape, phase), phase, self._label, shape, dtype, self._next)
        self._next += max(4096, -(-nbytes // 4096) * 4096) + 4096
        entry.reference = weakref.ref(memory, lambda _: self._freed(key))
        self._storages[key] = entry
        self._set_bytes(entry, nbytes)

    def _kind(self, shape: tuple[int, ...], phase: str) -> str:
        if phase not in ("forward", "backward"):
            return "other"
        return "logits" if self.vocabulary and len(shape) > 1 and shape[-1] == self.vocabulary else "activations"

    def _freed(self, key: int) -> None:
        entry = self._storages.pop(key, None)
        if entry is not None:
            self._set_bytes(entry, 0)

    def _set_bytes(self, entry: Storage, nbytes: int) -> None:
        taken = -(-nbytes // _ROUND) * _ROUND if self.device.type != "cpu" and entry.tier != "host" else nbytes
        if taken != entry.nbytes:
            self.changes.append(Change(entry, taken - entry.nbytes, self._label))
            entry.nbytes = taken

    def set_label(self, label: str) -> None:
        """Set the label of the next changes: the engine's note of the work that it begins."""
        self._label = label

    # -- called by the plan -----------------------------------------------------------------------------------------------

    def storage_of(self, tensor: torch.Tensor | None) -> Storage | None:
        """Return the recorded storage of ``tensor``; None if there is none."""
        return self._storages.get(tensor.untyped_storage()._cdata) if isinstance(tensor, FakeTensor) else None

    def mark(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Set the kind of the storages of ``tensors``."""
        for tensor in tensors:
            entry = self.storage_of(tensor)
            if entry is not None:
                entry.kind = kind

    @contextmanager
    def allocating(self, kind: str) -> Iterator[None]:
        """Give storages that are allocated inside the ``with`` the kind ``kind``."""
        before, self.current_kind = self.current_kind, kind
        try:
            yield
        finally:
            self.current_kind = before

    def wrapped(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``call`` and gives the storages it allocates the kind ``kind``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.allocating(kind):
                return call(*args, **kwargs)

        return run

    # -- entering ---------------------------------------------------------------------------------------------------------

    def address_of(self, tensor: torch.Tensor) -> int:
        """Return the value of ``data_ptr()`` for a fake tensor: the address of its first element, or 0 without elements."""
        entry = self.storage_of(tensor)
        return entry.address + int(tensor.storage_offset()) * tensor.element_size() if entry is not None and tensor.numel() else 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make torch create only fake tensors inside the ``with``, and record their storages."""
        resize, address = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr

        def resized(memory: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(memory, nbytes)
            entry = self._storages.get(memory._cdata)
            if entry is not None:
                self._set_bytes(entry, nbytes)
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
            stack.enter_context(observe.listening(self.set_label))
            stack.enter_context(self)
            torch._C._set_only_lift_cpu_tensors(True)
            try:
                yield
            finally:
                torch._C._set_only_lift_cpu_tensors(lifts)


def _item(tensor: Any) -> Any:
    """Return the value of ``tensor.item()``: the constant if torch knows it; else 1: finite, true, and neutral in products."""
    if tensor.constant is not None:
        with torch.utils._mode_utils.no_dispatch():
            return tensor.constant.item()
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _grouped_product(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    """Return an empty result of a grouped matrix product: torch gives its shape only for bf16, but computes other dtypes on a CPU too."""
    groups = (offs.numel(),) if offs is not None and left.dim() == right.dim() == 2 else tuple(left.shape[:-2]) if right.dim() == 3 else ()
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]))
