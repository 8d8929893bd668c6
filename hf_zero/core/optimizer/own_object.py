"""Let a script go on to use the torch optimizer that it passed to the engine, and refuse others over the engine's parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, Protocol
from weakref import ref

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from hf_zero.core.optimizer.clones import clone, options_of
from hf_zero.core.optimizer.master_parts import MasterParts
from hf_zero.core.units.unit import Unit, find_unit, trained_of
from hf_zero.core.units.values import publish
from hf_zero.errors import StateError


class Outer(Protocol):
    """Interface of the engine's optimizer."""

    @property
    def units(self) -> Sequence[Unit]:
        """Return the trainable units."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take the engine's step."""


class OwnObject:
    """Methods of the script's torch optimizer while an engine updates with it.

    Its groups hold flat parts of masters, which have gradients only in the engine's step. So its ``step`` would update nothing, and its
    ``train`` and ``eval``, by which schedule-free optimizers exchange weights, would change the masters alone. A script that calls them
    gets the engine's step, and weights that all ranks see.

    Attributes:
        change: Set by the engine's step: calls a function that writes to masters, and shows the new values; collective.
        fetch: Gives the tensors in the groups their values before a method writes to them; collective.
        send: Takes the values that a method has written, and calls its argument with each unit, in order; collective.
        parts: The tensors in the groups, and what a script has written to them.

    Args:
        inner: The torch optimizer.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        _ForeignSteps.watch()
        self.change: Callable[[Callable[[], object]], None] | None = None
        self.fetch: Callable[[], None] = lambda: None
        self.send: Callable[[Callable[[Unit], None]], None] | None = None
        self.parts = MasterParts()
        self._inner = inner
        self._updates = False
        self._own: dict[str, Callable[..., Any]] = {}
        self._served: object = None  # the method that replaces ``step``
        self._outer: ref[Any] | None = None

    def connect(self, outer: Outer) -> None:
        """Replace the methods; ``outer`` gets ``train`` and ``eval`` too if the optimizer has them."""
        self._outer = ref(outer)
        for name in ("step", "train", "eval"):
            own = getattr(self._inner, name, None)
            if own is not None and name not in self._own:
                self._own[name] = own
                vars(self._inner)[name] = MethodType(self._for_scripts(name, own), self._inner)
                if name == "step":
                    self._served = vars(self._inner)[name]
                else:
                    vars(outer)[name] = vars(self._inner)[name]

    def disconnect(self) -> None:
        """Give the optimizer its own methods again."""
        outer = self._outer() if self._outer is not None else None
        for name in self._own:
            vars(self._inner).pop(name, None)
            if outer is not None:
                vars(outer).pop(name, None)
        self._own = {}

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let the methods be the optimizer's own inside: the engine calls them. Its post-step hooks wait for ``ShardedOptimizer.end_step``:
        before, the model's parameters have their old values, and what a hook writes to them would be replaced by the masters' values.
        """
        inner: Any = self._inner
        hooks, inner._optimizer_step_post_hooks = inner._optimizer_step_post_hooks, OrderedDict()
        self._updates = True
        self.parts.pause()
        try:
            yield
        finally:
            self._updates = False
            self.parts.resume()
            hooks.update(inner._optimizer_step_post_hooks)  # registered inside
            inner._optimizer_step_post_hooks = hooks

    def write(self, change: Callable[[], object], updated: Callable[[Unit], None]) -> None:
        """Call ``change``, which writes to the tensors in the groups, and ``updated`` with each unit that is trained now; collective."""
        with self.updating():
            self.fetch()
            change()
        outer = self._outer() if self._outer is not None else None
        if self.send is not None:
            self.send(updated)
        elif outer is not None:
            units = trained_of(outer.units)
            publish(units)
            for unit in units:
                updated(unit)

    def steps_itself(self) -> bool:
        """Return whether an update runs nothing of a script: neither hooks on all optimizers of this process, nor a replaced ``step``.

        The wrapper of torch's schedulers, which counts calls, is no replacement.
        """
        before, now = self._own.get("step"), vars(self._inner).get("step")
        ordinary = getattr(before, "__func__", None) is type(self._inner).step or hasattr(before, _SCHEDULER)
        replaced = now is not self._served and not hasattr(now, _SCHEDULER)
        hooks = [hook for hook in _global_optimizer_pre_hooks.values() if hook is not _ForeignSteps._refuse]
        return ordinary and not (replaced or hooks or _global_optimizer_post_hooks)

    def require_own_state(self) -> None:
        """Raise if ``state`` has entries of the model's parameters, in whose place the groups hold flat parts of masters.

        Raises:
            StateError: There is such an entry; the message names the parameter.
        """
        for key in self._inner.state:
            owner = find_unit(key) if isinstance(key, torch.Tensor) else None
            if owner is not None:
                raise StateError(
                    f"optimizer.state was used with {owner[0].layout.slots[owner[1]].name}, but the engine keeps the states of flat parts "
                    "of its parameters there, so this entry has no effect. Use hf_zero.utils.safe_get_full_optimizer_state and "
                    "safe_set_full_optimizer_state, the tensors in optimizer.param_groups, or optimizer.state.clear() to begin anew"
                )

    def _for_scripts(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        weak = ref(self)

        @wraps(own)
        def method(inner: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            itself = weak()
            outer = itself._outer() if itself is not None and itself._outer is not None else None
            if itself is None or outer is None or itself._updates:
                return own(*args, **kwargs)
            return outer.step(*args, **kwargs) if name == "step" else itself._set_mode(name)

        return method

    def _set_mode(self, name: str) -> None:
        """Call ``train`` or ``eval`` if that changes an option of the groups; found by a call without tensors. Collective."""
        groups = [{**options_of(group), "params": []} for group in self._inner.param_groups]
        before = repr(groups)
        getattr(type(self._inner), name)(clone(self._inner, groups))
        if repr(groups) == before:
            return
        if self.change is None:
            self._own[name]()
        else:
            self.change(self._own[name])


_SCHEDULER = "_wrapped_by_lr_sched"  # attribute of the wrapper by which torch's schedulers count calls of ``step``


class _ForeignSteps:
    """Hook on the steps of all optimizers of this process that finds those over parameters of an engine, from the first engine on."""

    _hooked = False

    @classmethod
    def watch(cls) -> None:
        """Register the hook; further calls do nothing."""
        if not cls._hooked:
            cls._hooked = True
            register_optimizer_step_pre_hook(cls._refuse)

    @staticmethod
    def _refuse(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Raise if ``optimizer`` was made over parameters whose gradients an engine has: it would find none, and update nothing.

        Raises:
            StateError: The first such parameter is named.
        """
        for group in optimizer.param_groups:
            for param in group["params"]:
                owner = find_unit(param)
                if owner is None or not owner[0].trainable or owner[0].belongs_to is None:
                    continue
                training = owner[0].belongs_to()
                if training is not None and training.trains:
                    raise StateError(
                        f"{type(optimizer).__name__}.step(): {owner[0].layout.slots[owner[1]].name} is trained by an engine, which has its "
                        "gradients: this optimizer would not train it. Pass it to initialize(), or prepare it in one call with the model; "
                        "rates and further param groups can be changed in engine.optimizer"
                    )
