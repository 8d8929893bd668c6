"""`engine.offload_states()`: an idle engine's tensors wait in host memory, so that something else can have the device.

Who alternates training with generation (an actor and vLLM on one GPU) calls it between the two. It has nothing to do with the
`offload_*` sections of the configuration, whose state rests on the host all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hf_zero.core.schedule.outputs import tensors_in
from hf_zero.core.units.own_part import has_memory
from hf_zero.core.units.values import write_back_assigned
from hf_zero.errors import ConfigError, StateError
from hf_zero.memory.buffers import HostMemory, HostPool
from hf_zero.observe import warn_once

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""DeepSpeed's names: moments, fp32 masters, parameters, gradients accumulated so far, buffers of gradients on their way."""


class Storages:
    """Memory of tensors, moved to the host and back; the tensors stay the same objects, empty in between.

    Args:
        tensors: Tensors whose memory is to be moved; views of one memory count once.
        pool: Where the copies wait.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], pool: HostPool) -> None:
        self._pool = pool
        self._copies: list[tuple[torch.UntypedStorage, torch.Tensor, torch.Tensor]] = []  # each with the block that its copy lies in
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in seen:
                seen.add(storage._cdata)
                block = pool.take(storage.nbytes())
                copy = block[: storage.nbytes()].copy_(_as_bytes(storage), non_blocking=True)
                self._copies.append((storage, copy, block))
        for storage, _, _ in self._copies:  # not before all have a copy: there may be too little memory
            storage.resize_(0)  # freed in the order of the stream that copies

    @property
    def nbytes(self) -> int:
        """Bytes that wait on the host."""
        return sum(copy.numel() for _, copy, _ in self._copies)

    def bring_back(self, non_blocking: bool = False) -> None:
        """Gives the tensors their memory and values again."""
        for storage, copy, block in self._copies:
            storage.resize_(copy.numel())
            _as_bytes(storage).copy_(copy, non_blocking=non_blocking)
            self._pool.give(block)
        self._copies.clear()


def offload_states(
    engine: Any, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
) -> None:
    """Moves state of an idle engine to host memory; local. Until ``reload_states`` it can neither train nor be saved.

    A forward, ``GatheredParameters`` and the like go on working while the parameters stay where they are: without "lp_params" and, where
    the masters are the parameters themselves (fp32), without "hp_params".

    On a machine without accelerator, and for state that the configuration offloads, there is nothing to move.

    Args:
        engine: The engine.
        include: ``OffloadStateTypeEnum`` members or their names; None is everything.
        device: Only the host: ``OffloadDeviceEnum.cpu``, "cpu" or "none" (nothing is moved).
        pin_memory: Page-lock the copies. That memory stays with the engine for the next time, until ``destroy``.
        non_blocking: Changes nothing: copies to page-locked memory never wait.

    Raises:
        ConfigError: An unknown kind or device.
        StateError: The engine is in the middle of a forward or a backward, or of a forward whose backward may still come.
    """
    kinds = KINDS if include is None else tuple(getattr(kind, "value", kind) for kind in include)
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"offload_states(include=...): {kind!r} is no kind of state; there are {', '.join(KINDS)}")
    where = str(getattr(device, "value", device))
    if where == "none":
        return
    if where != "cpu":
        raise ConfigError(f"offload_states(device={where!r}): state of an idle engine goes to 'cpu' only")
    if not engine.runtime.idle:
        raise StateError(
            "offload_states() in the middle of a forward or a backward, or between them: call it after backward() and step(), and run "
            "forwards without a backward under torch.no_grad() or let go of what they returned"
        )
    if engine.collectives.topology.device.type == "cpu":
        warn_once("offload_states(): nothing to move, the engine lives in host memory already")
        return
    set_aside(engine, kinds, pin_memory)


def set_aside(engine: Any, kinds: Iterable[str], pin_memory: bool) -> None:
    """As ``offload_states``, for kinds known to be right; whatever device the engine lives on."""
    here = engine.collectives.topology.device.type
    engine.empty_partition_cache()
    for unit in engine.units:
        if all(has_memory(tensor) for tensor in unit.own.tensors()):
            write_back_assigned(unit)
    tensors = [tensor for kind in kinds for tensor in _TENSORS[kind](engine) if tensor.device.type == here]
    if engine.aside_pool is None or engine.aside_pool.memory.pin != pin_memory:
        engine.aside_pool = HostPool(HostMemory(engine.collectives.topology.device, pin_memory))
    aside = Storages(tensors, engine.aside_pool)
    if "contiguous_grad_buffer" in kinds and engine.stepper is not None:
        for gradients in engine.stepper.reducer.gradients:
            gradients.pool.clear()
    engine.aside.append(aside)
    for unit in engine.units:
        unit.set_offloaded(True)
    _guard(engine)


def reload_states(engine: Any, non_blocking: bool = False) -> None:
    """Brings back what ``offload_states`` moved; local. Does nothing when nothing was moved."""
    for aside in engine.aside:
        aside.bring_back(non_blocking)
    engine.aside.clear()
    for unit in engine.units:
        unit.set_offloaded(False)
    for guard in engine.aside_guards:
        guard.remove()
    engine.aside_guards.clear()


def require_states(engine: Any, what: str) -> None:
    """Raises where state that ``what`` needs waits on the host.

    Raises:
        StateError: ``offload_states`` was called last.
    """
    if engine.aside:
        raise StateError(f"{what} while state of the engine waits on the host; call engine.reload_states() first")


def _guard(engine: Any) -> None:
    """Puts hooks where values are read without asking the engine: modules, all of them, and the optimizer's own state dict."""
    for guard in engine.aside_guards:
        guard.remove()
    engine.aside_guards.clear()
    if not all(has_memory(tensor) for unit in engine.units for tensor in unit.own.tensors()[:1]):
        for module in engine.module.modules():
            engine.aside_guards.append(module.register_forward_pre_hook(_refuse("the model was called"), prepend=True))
            engine.aside_guards.append(module.register_state_dict_pre_hook(_refuse("the model's state_dict() was called")))
    if engine.stepper is not None:
        inner, refuse = engine.optimizer.inner, _refuse("the optimizer's state was saved or loaded")
        engine.aside_guards += [inner.register_state_dict_pre_hook(refuse), inner.register_load_state_dict_pre_hook(refuse)]


def _refuse(what: str) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise StateError(f"{what} while state of its engine waits on the host; call engine.reload_states() first")

    return refuse


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _moments(engine: Any) -> Iterator[torch.Tensor]:
    for state in engine.optimizer.state.values() if engine.stepper is not None else ():
        yield from (value for value in tensors_in(state) if value.dim() > 0)


def _masters(engine: Any) -> Iterator[torch.Tensor]:
    return (tensor for unit in engine.units for tensor in unit.own.tensors()[1:])


def _parameters(engine: Any) -> Iterator[torch.Tensor]:
    for unit in engine.units:
        yield unit.own.tensors()[0]
        yield from (param.data for param in unit.params if param is not None)


def _gradients(engine: Any) -> Iterator[torch.Tensor]:
    found = engine.stepper.reducer.gradients if engine.stepper is not None else ()
    return (gradients.shard for gradients in found if gradients.shard is not None)


_TENSORS: dict[str, Callable[[Any], Iterator[torch.Tensor]]] = {
    "optim_states": _moments,
    "hp_params": _masters,
    "lp_params": _parameters,
    "lp_grads": _gradients,
    "contiguous_grad_buffer": lambda engine: iter(()),
}
