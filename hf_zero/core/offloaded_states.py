"""Move state of an idle engine to host memory, so that other work can use the device.

It serves scripts that alternate training with generation (an actor and an inference engine on one GPU). It is unrelated to the
``offload_*`` sections of a configuration, whose state is always kept on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.units.shard import has_memory
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import adopt_writes
from hf_zero.errors import StateError
from hf_zero.memory.buffers import HostMemory, HostPool

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""Kinds of state: moments, fp32 masters, parameters, gradients accumulated so far, buffers of gradients that are being reduced."""


class Storages:
    """Memory of tensors, moved to the host and back; the tensor objects stay the same, and are empty in between.

    Args:
        tensors: Tensors whose memory is to be moved; views of one memory count once.
        pool: Pool from which the memory of the copies is taken.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], pool: HostPool) -> None:
        self._pool = pool
        self._copies: list[tuple[torch.UntypedStorage, torch.Tensor, torch.Tensor]] = []  # each tensor with the block of its copy
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in seen:
                seen.add(storage._cdata)
                block = pool.take(storage.nbytes())
                copy = block[: storage.nbytes()].copy_(_as_bytes(storage), non_blocking=True)
                self._copies.append((storage, copy, block))
        for storage, _, _ in self._copies:  # only after all tensors have a copy: there may be too little memory for the copies
            storage.resize_(0)  # freed in the order of the stream that copies

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that are on the host."""
        return sum(copy.numel() for _, copy, _ in self._copies)

    def copy_back(self, non_blocking: bool = False) -> None:
        """Allocate the tensors' device memory again and copy their values back."""
        for storage, copy, block in self._copies:
            storage.resize_(copy.numel())
            _as_bytes(storage).copy_(copy, non_blocking=non_blocking)
            self._pool.give(block)
        self._copies.clear()


class OffloadedStates:
    """State of one engine that has been moved to the host. Until it is back, the engine can neither train nor be saved.

    A forward and ``GatheredParameters`` still work while the parameters are not moved: that is, without "lp_params" and, if the masters are
    the parameters themselves (fp32), without "hp_params".

    Args:
        runtime: Hooks of the engine.
        units: All units.
        device: Device of the engine.
        optimizer: The engine's optimizer; None for an engine that only runs forward.
        gradients: Gradients of each trainable unit.
    """

    def __init__(
        self,
        runtime: Runtime,
        units: Sequence[Unit],
        device: torch.device,
        optimizer: ShardedOptimizer | None,
        gradients: Sequence[UnitGradients],
    ) -> None:
        self._runtime = runtime
        self._units = units
        self._device = device
        self._optimizer = optimizer
        self._gradients = gradients
        self._moved: list[Storages] = []
        self._pool: HostPool | None = None  # pool of the copies
        self._guards: list[Any] = []  # handles of hooks

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that are on the host."""
        return sum(moved.nbytes for moved in self._moved)

    def move(self, kinds: Sequence[str], pin_memory: bool) -> None:
        """Move state of ``kinds`` to the host; local. State that is on the host already is not changed.

        Args:
            kinds: Names from ``KINDS``.
            pin_memory: Page-lock the copies. The memory is kept for the next call, until ``close``.
        """
        self._runtime.reshard_for_update()
        if self._runtime.backward.reducer is not None:
            self._runtime.backward.reducer.shown.end()
        for unit in self._units:
            if all(has_memory(tensor) for tensor in unit.own.tensors()):
                adopt_writes(unit, self._runtime.idle)
        tensors = [tensor for kind in kinds for tensor in self._tensors(kind) if tensor.device.type == self._device.type]
        if self._pool is None or self._pool.memory.pin != pin_memory:
            self._pool = HostPool(HostMemory(self._device, pin_memory))
        moved = Storages(tensors, self._pool)
        if "contiguous_grad_buffer" in kinds:
            for gradients in self._gradients:
                gradients.collected.pool.clear()
        self._moved.append(moved)
        for unit in self._units:
            unit.set_offloaded(True)
        self._guard()

    def copy_back(self, non_blocking: bool = False) -> None:
        """Copy all state that is on the host back to the device; local. Does nothing if there is none."""
        for moved in self._moved:
            moved.copy_back(non_blocking)
        self._moved.clear()
        for unit in self._units:
            unit.set_offloaded(False)
        self._unguard()

    def devices(self, kind: str) -> set[torch.device]:
        """Return the devices that hold the state of ``kind`` now; local."""
        pooled = (tensor for gradients in self._gradients for tensor in gradients.collected.pool.tensors())
        tensors = pooled if kind == "contiguous_grad_buffer" else self._tensors(kind)
        return {tensor.device if has_memory(tensor) else torch.device("cpu") for tensor in tensors if tensor.numel()}

    def require_none(self, what: str) -> None:
        """Raise if state that ``what`` needs is on the host.

        Raises:
            StateError: Some state was moved and not moved back.
        """
        if self._moved:
            raise StateError(f"{what} while state of the engine is on the host; call engine.reload_states() first")

    def close(self) -> None:
        """Free the references to the optimizer and the gradients, and the memory for copies."""
        self._optimizer, self._gradients, self._pool = None, (), None

    def _tensors(self, kind: str) -> Iterator[torch.Tensor]:
        if kind == "optim_states":
            for state in self._optimizer.state.values() if self._optimizer is not None else ():
                yield from (value for value in tree_leaves(state) if isinstance(value, torch.Tensor) and value.dim() > 0)
        elif kind == "hp_params":
            yield from (tensor for unit in self._units for tensor in unit.own.tensors()[1:])
        elif kind == "lp_params":
            for unit in self._units:
                yield unit.own.tensors()[0]
                yield from (param.data for param in unit.params if param is not None)
        elif kind == "lp_grads":
            yield from (gradients.shard for gradients in self._gradients if gradients.shard is not None)

    def _guard(self) -> None:
        """Register hooks at every place that reads values without calling the engine: all modules, and the optimizer's own state dict."""
        self._unguard()
        if not all(has_memory(tensor) for unit in self._units for tensor in unit.own.tensors()[:1]):
            for module in self._runtime.module.modules():
                self._guards.append(module.register_forward_pre_hook(_refuse("the model was called"), prepend=True))
                self._guards.append(module.register_state_dict_pre_hook(_refuse("the model's state_dict() was called")))
        if self._optimizer is not None:
            inner, refuse = self._optimizer.inner, _refuse("the optimizer's state was saved or loaded")
            self._guards += [inner.register_state_dict_pre_hook(refuse), inner.register_load_state_dict_pre_hook(refuse)]

    def _unguard(self) -> None:
        for guard in self._guards:
            guard.remove()
        self._guards.clear()


def _refuse(what: str) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise StateError(f"{what} while state of its engine is on the host; call engine.reload_states() first")

    return refuse


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
