"""Run ``generate()`` of a model whose parameters are sharded: unsharded once for the complete call, or block by block."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.nodes import free_bytes, ranks_on_this_host
from hf_zero.core.schedule.forward_hooks import RAISED, as_written
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.units.unit import Unit
from hf_zero.errors import CollectiveError
from hf_zero.observe import log_rank0
from hf_zero.system.sizes import size_text

# Part of the free memory that the unsharded model may take; the rest is for keys, values and activations.
SHARE_OF_FREE_MEMORY = 0.6


class WrappedGenerate(ABC):
    """Wrapper of the ``generate`` methods of a module and of the modules inside it.

    Attributes:
        synced: Whether ranks run the same number of forwards, together; None leaves it to the caller.
        before: Called before a call of ``generate``; None for nothing.
    """

    synced: bool | None = False
    before: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def attach(self, module: nn.Module) -> None:
        """Wrap the ``generate`` method of every module inside ``module`` that has one. ``remove`` undoes it."""
        for inner in module.modules():
            if callable(getattr(type(inner), "generate", None)):
                inner.__dict__["generate"] = GenerateMethod(self, inner)
                self._modules.append(inner)

    def remove(self) -> None:
        """Remove the wrappers; the runtime calls it when it removes its hooks."""
        for module in self._modules:
            method = module.__dict__.get("generate")
            if isinstance(method, GenerateMethod):
                del module.__dict__["generate"]
                if method.replaced is not None:
                    module.__dict__["generate"] = method.replaced
        self._modules = []

    @abstractmethod
    def run(self, module: nn.Module, generate: Callable[[], Any]) -> Any:
        """Call ``generate``, which runs ``module``; collective."""


class PlainGeneration(WrappedGenerate):
    """Wrapper of the ``generate`` methods inside a module that can generate as it is."""

    synced = None

    def run(self, module: nn.Module, generate: Callable[[], Any]) -> Any:
        """Call ``generate``; local."""
        return generate()


class Generation(WrappedGenerate):
    """Wrapper of the ``generate`` methods inside a module whose parameters stage 3 reshards between uses.

    [Note: generation] A model is asked for one token at a time, so unsharding block by block would send the complete model for every
    token. If the unsharded model fits into memory, it is unsharded once around the call, and ranks generate independently. Otherwise each
    forward is an unshard pass ([Note: unshard passes]) that begins with a vote. A rank that has generated its tokens still takes part in
    the votes and all-gathers, without computing anything, until no rank needs another forward. In neither case do ranks have to stop at
    the same length, so the option ``synced_gpus``, with which finished ranks run complete forwards, is switched off. If ranks hold experts
    for each other (``synced``), every forward needs all ranks: the option is switched on, and ranks stop together.

    Args:
        runtime: The hooks of the engine.
        units: All units of the engine; the list changes when parameters join.
        collectives: All data-parallel ranks.
        gather: ``"auto"`` decides by the free memory; True always unshards the model once, False never.
        synced: Whether ranks run the same number of forwards, together.
    """

    def __init__(
        self, runtime: Runtime, units: Sequence[Unit], collectives: Collectives, gather: bool | Literal["auto"], synced: bool = False
    ) -> None:
        super().__init__()
        self.gather = gather
        self.synced = synced
        self._runtime = runtime
        self._all_units = units
        self._collectives = collectives
        self._told: set[bool] = set()

    @property
    def _units(self) -> list[Unit]:
        return [unit for unit in self._all_units if unit.reshards]

    def run(self, module: nn.Module, generate: Callable[[], Any]) -> Any:
        """Call ``generate``, which runs ``module``; collective."""
        if all(unit.pinned for unit in self._units):  # the caller or an outer generate() has unsharded the model
            return generate()
        if self._decide():
            return self._unsharded(generate)
        return generate() if self.synced else self._by_blocks(module, generate)

    def _decide(self) -> bool:
        """Return whether to unshard the complete model once; the same on every rank, and logged when the decision changes."""
        if self.gather != "auto":
            return self.gather
        topology = self._collectives.topology
        needed = sum(unit.bytes_to_unshard for unit in self._units)
        free = free_bytes(topology.device, ranks_on_this_host(topology.world) if topology.device.type == "cpu" else 1)
        fits = free is not None and needed <= SHARE_OF_FREE_MEMORY * free
        gather = not self._collectives.any_rank(not fits, "gather for generation")
        self._tell(gather, needed, free)
        return gather

    def _tell(self, gather: bool, needed: int, free: int | None) -> None:
        there = "an unknown amount" if free is None else size_text(free, ".0f", "MiB")
        seen = f"it needs {size_text(needed, '.0f', 'MiB')}, {there} of memory is free"
        what = "gathers the whole model once" if gather else "gathers block by block for every token"
        if gather not in self._told:
            self._told.add(gather)
            log_rank0("generate() %s: %s (hf_zero.gather_for_generation in the configuration decides it)", what, seen)

    def _unsharded(self, generate: Callable[[], Any]) -> Any:
        units = self._units
        for unit in units:
            unit.start_unshard(exact=True)
        pinned: list[Unit] = []
        try:
            for unit in units:
                unit.pin()
                pinned.append(unit)
            return generate()
        finally:
            for unit in pinned:
                unit.unpin()

    def _by_blocks(self, module: nn.Module, generate: Callable[[], Any]) -> Any:
        runtime, root = self._runtime, self._runtime.root

        def before(*_: Any) -> None:
            self._collectives.any_rank(True, "another token")
            if module is not root.module:  # a wrapper's inner model: each of its forwards is an unshard pass
                runtime.enter(root)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if module is not root.module:
                runtime.leave(root, RAISED if output is None else output)

        handles = [module.register_forward_pre_hook(before, prepend=True), module.register_forward_hook(after, always_call=True)]
        try:
            result = generate()
        except CollectiveError:
            raise  # no rank is left that could join
        except Exception:
            _remove(handles)
            self._join()
            raise
        finally:
            _remove(handles)
        self._join()
        return result

    def _join(self) -> None:
        """Take part in the forwards of tokens that other ranks still generate; collective."""
        self._runtime.forward.settle()
        while self._collectives.any_rank(False, "another token"):
            self._runtime.forward.join()


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class GenerateMethod:
    """The ``generate`` attribute of one module; a copy of the module gets a plain bound method instead.

    Attributes:
        replaced: What the script had set in the place of the class's method; None without.
    """

    def __init__(self, generation: WrappedGenerate, module: nn.Module) -> None:
        self._generation = generation
        self._module = module
        own: Any = module.__dict__.get("generate")
        self.replaced: Callable[..., Any] | None = own.replaced if isinstance(own, GenerateMethod) else own
        method = getattr(type(module), "generate")  # noqa: B009 - a Module has no such name for the type checker
        self.__wrapped__: Callable[..., Any] = MethodType(method, module) if self.replaced is None else self.replaced
        self._synced = "synced_gpus" in inspect.signature(self.__wrapped__).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the class's method, uncompiled ([Note: generation and torch.compile]), with ``synced_gpus`` as [Note: generation] says."""
        if self._synced and self._generation.synced is not None:
            kwargs["synced_gpus"] = self._generation.synced
        if self._generation.before is not None:
            self._generation.before()
        with as_written(self._module):
            return self._generation.run(self._module, partial(self.__wrapped__, *args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        if copied is None:
            return self
        return MethodType(type(copied).generate, copied) if self.replaced is None else deepcopy(self.replaced, memo)
