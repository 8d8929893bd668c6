"""Let a script go on to use the torch optimizer that it passed to the engine, and refuse others over the engine's parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_zero.comm.collectives import Collectives
from hf_zero.core.optimizer import step_hooks
from hf_zero.core.optimizer.clones import clone, options_of
from hf_zero.core.optimizer.master_parts import MasterPart, MasterParts, RestingParam
from hf_zero.core.optimizer.script_states import foreign_state
from hf_zero.core.units.checksums import checksum
from hf_zero.core.units.parts import PartOfGradient, warns_of_norms
from hf_zero.core.units.registration import network_of_loose, noted_loose
from hf_zero.core.units.sharded_parameter import OWNER
from hf_zero.core.units.unit import Unit, find_unit, is_sharded, trained_of
from hf_zero.core.units.values import publish
from hf_zero.errors import StateError

T = TypeVar("T")


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

    [Note: a step that a script has replaced] A script's function in place of ``step`` (a mask, an average, a counter) does its work before
    and after the original, on the parameters of the model. It is called once around the engine's whole step, whoever begins that: its
    original is then the engine's step, after which all parameters have their new values, and the engine updates with the method of the
    optimizer's class. A function from before ``connect``, or on the class, holds that method itself as its original. So the method is
    called over no parameters then, and a hook on it takes the engine's step.

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
        self._class_step: Any = type(inner).step  # a script may replace it later
        self._served: Any = None  # the method that replaces ``step``
        self._take: Callable[[], object] | None = None  # the engine's step, which waits for the script's ``step``
        self._inside = False  # inside the script's call of ``step``
        self._outer: ref[Any] | None = None

    def connect(self, outer: Outer) -> None:
        """Replace the methods; ``outer`` gets ``train`` and ``eval`` too if the optimizer has them."""
        self._outer = ref(outer)
        _Scalers.refuse(self._inner, outer)
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
        _Scalers.allow(self._inner, outer)
        for name in self._own:
            vars(self._inner).pop(name, None)
            if outer is not None:
                vars(outer).pop(name, None)
        self._own = {}

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Restore the methods of the optimizer's class inside the ``with``, without hooks: the engine calls them."""
        held = vars(self._inner).pop("step", None)
        self._updates = True
        self.parts.pause()
        try:
            with step_hooks.deferred(self._inner), self._class_as_made():
                yield
        finally:
            self._updates = False
            self.parts.resume()
            if held is not None:
                vars(self._inner)["step"] = held

    def before_step(self, whole: bool) -> Callable[[], None] | None:
        """Return a function that calls the script's pre-step hooks on the engine's, this and all optimizers, while the tensors in the
        groups have their gradients; None if there are none.

        Args:
            whole: Whether the tensors are whole parameters, and not pieces of flat shards, of which a norm gets a warning.
        """
        outer: Any = self._outer() if self._outer is not None else None
        outers = (*outer._optimizer_step_pre_hooks.values(),) if outer is not None else ()
        own = step_hooks.hooks_before(self._inner)
        if not (outers or own):
            return None

        def call() -> None:
            with nullcontext() if whole else _shown_pieces(self._inner):
                if outer is not None:
                    step_hooks.call_before(outer, outers)
                step_hooks.call_before(self._inner, own)

        return call

    def around(self, take: Callable[[], T], refuse: Callable[[str], object]) -> T:
        """Return ``take()``, which takes the engine's step, through the function by which a script has replaced ``step``, if it has.

        Args:
            take: Takes the step.
            refuse: See ``once``.

        Raises:
            StateError: The function has not called its original once.
        """
        if self._inside or not self._replaced():
            return take()
        return once("optimizer.step", self._inner.step, take, lambda taking: setattr(self, "_take", taking), refuse)

    def _replaced(self) -> bool:
        """Return whether a script has replaced ``step``, on the object or its class, before ``connect`` or since. The wrapper of torch's
        schedulers, which counts calls, is no replacement.
        """
        if self._served is None:
            return False
        now = vars(self._inner).get("step", self._served)
        return _beneath(now) is not self._served.__func__ or self._replaced_before()

    def _replaced_before(self) -> bool:
        """Return whether a function of the script, which has the class's own method as its original, is in place of ``step``."""
        return _beneath(self._own["step"]) is not type(self._inner).step

    @contextmanager
    def _class_as_made(self) -> Iterator[None]:
        """Undo inside that a script has replaced ``step`` of the optimizer's class."""
        kind: Any = next(kind for kind in type(self._inner).__mro__ if "step" in vars(kind))
        now = vars(kind)["step"]
        if now is self._class_step:
            yield
            return
        kind.step = self._class_step
        try:
            yield
        finally:
            kind.step = now

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
        """Return whether an update runs nothing of a script: neither hooks on all optimizers of this process, nor a replaced ``step``."""
        return not (self._replaced() or step_hooks.hooks_before(self._inner) or step_hooks.hooks_after())

    def foreign_states(self) -> str:
        """Return the text of an error if ``state`` has entries of the model's parameters, in whose place the groups hold flat parts of
        masters; "" if not. Local: a pipeline has each parameter on some ranks only.
        """
        return next((foreign_state(key) for key in self._inner.state if getattr(key, OWNER, None) is not None), "")  # runs in each step

    def _for_scripts(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        weak = ref(self)

        @wraps(own)
        def method(inner: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            itself = weak()
            outer = itself._outer() if itself is not None and itself._outer is not None else None
            if itself is None or outer is None or itself._updates:
                return own(*args, **kwargs)
            return itself._begin(outer, own, args, kwargs) if name == "step" else itself._set_mode(name)

        return method

    def _begin(self, outer: Outer, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Take the engine's step, because ``step`` was called, through the script's function from before ``connect`` if there is one."""

        def take(*args: Any, **kwargs: Any) -> Any:
            if self._take is not None:
                return self._take()
            before, self._inside = self._inside, True
            try:
                return outer.step(*args, **kwargs)
            finally:
                self._inside = before

        if not self._replaced_before():
            return take(*args, **kwargs)

        def take_instead(_: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
            with step_hooks.usual(self._inner):
                result = take(*given[1:], **options)
            groups = [{**options_of(group), "params": []} for group in self._inner.param_groups]
            return (clone(self._inner, groups, defaultdict(dict)), *[lambda: result] * bool(given[1:] or options)), {}

        if _beneath(own) is self._class_step:  # the class has another one now
            own = MethodType(type(self._inner).step, self._inner)
        with step_hooks.deferred(self._inner, take_instead):
            return own(*args, **kwargs)

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


def missing_attribute(outer: Any, name: str) -> Any:
    """Raise the error for a name that the engine's optimizer ``outer`` does not have; it says where the script's optimizer has it.

    Raises:
        AttributeError: Always.
    """
    inner = vars(outer).get("inner")
    if name.startswith("_") or inner is None or not hasattr(inner, name):
        raise AttributeError(f"{type(outer).__name__!r} object has no attribute {name!r}")
    raise AttributeError(
        f"engine.optimizer has no {name!r}, an attribute of the {type(inner).__name__} given to initialize(). That object, which is "
        "engine.optimizer.inner, has it; but its param groups hold parts of this rank's masters, without gradients outside of "
        "engine.step(), so a method that steps or reads gradients has no effect there"
    )


def once(
    name: str,
    call: Callable[[], object],
    take: Callable[[], T],
    wait: Callable[[Callable[[], object] | None], None],
    refuse: Callable[[str], object],
) -> T:
    """Return ``take()``, which takes a step, called through a script's function.

    Args:
        name: Name of the method that the script has replaced.
        call: Calls the script's function.
        take: Takes the step.
        wait: Is given the function that the method's original calls in place of a step; None at the end.
        refuse: Raises its argument on all ranks, in the vote of the step that the other ranks take; collective.

    Raises:
        StateError: The script's function has not called the original once.
    """
    results: list[T] = []

    def take_once() -> None:
        if results:
            raise StateError(_not_once(name, call, 2))
        results.append(take())

    wait(take_once)
    try:
        call()
    finally:
        wait(None)
    if not results:
        refuse(_not_once(name, call, 0))
    return results[0]


def _not_once(name: str, call: Callable[[], object], times: int) -> str:
    return (
        f"{name} was replaced by {getattr(call, '__qualname__', call)}, which called the original step {times} times in engine.step(): "
        "call it once on every rank, because the engine updates in the original"
    )


def _beneath(step: Any) -> Any:
    """Return the function of the method ``step``, inside the wrappers by which torch's schedulers count calls."""
    function = getattr(step, "__func__", step)
    while getattr(function, "__globals__", None) is vars(lr_scheduler) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@contextmanager
def _shown_pieces(inner: torch.optim.Optimizer) -> Iterator[None]:
    """Make gradients of pieces of flat shards warn if a norm of them is computed inside the ``with``."""
    params = [param for group in inner.param_groups for param in group["params"]]
    for param in params:
        if type(param.grad) is torch.Tensor:
            param.grad = warns_of_norms(
                param.grad,
                "a gradient in a step pre-hook covers only a piece of it: optimizer.param_groups has pieces of this rank's flat masters. "
                "Use engine.get_global_grad_norm(), or param.grad of the model's parameters between backward and "
                'step() ("hf_zero": {"show_gradients": true})',
            )
    try:
        yield
    finally:
        for param in params:
            if isinstance(param.grad, PartOfGradient):
                param.grad = param.grad.as_subclass(torch.Tensor)


class _Scalers:
    """Checks in torch's ``GradScaler``, from the first engine on: it finds no gradients in the groups of an engine's optimizer.

    Its own errors name neither cause nor remedy, and ``unscale_`` alone would leave the loss scale in the gradients without a word.
    """

    _served: WeakSet[Any] = WeakSet()  # optimizers that an engine steps, and the objects that engines give to scripts

    @classmethod
    def refuse(cls, *optimizers: object) -> None:
        """Make ``step`` and ``unscale_`` raise for ``optimizers``, and for wrappers that hold one as ``.optimizer``."""
        for name in ("step", "unscale_"):
            method = getattr(torch.amp.GradScaler, name)
            if not hasattr(method, "__wrapped__"):
                setattr(torch.amp.GradScaler, name, cls._checked(method))
        cls._served.update(optimizers)

    @classmethod
    def allow(cls, *optimizers: object) -> None:
        """End the effect of ``refuse``; None is ignored."""
        cls._served.difference_update(optimizer for optimizer in optimizers if optimizer is not None)

    @classmethod
    def _checked(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(scaler: torch.amp.GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if scaler.is_enabled() and (optimizer in cls._served or getattr(optimizer, "optimizer", None) in cls._served):
                raise StateError(
                    f"{type(scaler).__name__}.{method.__name__}(): an engine has the gradients of this optimizer, so the scaler finds "
                    "none. Create it with enabled=False, and let the engine scale losses: set fp16.enabled, or torch_autocast with the "
                    "dtype float16"
                )
            return method(scaler, optimizer, *args, **kwargs)

        return call


_idle: WeakKeyDictionary[Collectives, ref[object]] = WeakKeyDictionary()  # runtimes of engines without an optimizer


def refuse_steps_over(network: Collectives, runtime: object) -> None:
    """Make steps of optimizers over the model of an engine without an optimizer raise, until ``allow_steps_over``.

    Args:
        network: The engine's data-parallel ranks.
        runtime: The engine's.
    """
    _ForeignSteps.watch()
    _idle[network] = ref(runtime)


def allow_steps_over(network: Collectives) -> None:
    """End the effect of ``refuse_steps_over``: the engine is destroyed."""
    _idle.pop(network, None)


class _ForeignSteps:
    """Hooks on the steps of all optimizers of this process that detect steps over parameters of an engine, from the first engine on."""

    _hooked = False

    @classmethod
    def watch(cls) -> None:
        """Register the hooks; further calls do nothing."""
        if not cls._hooked:
            cls._hooked = True
            step_hooks.own_hooks.extend((cls._refuse, cls._note))
            register_optimizer_step_pre_hook(cls._refuse)
            register_optimizer_step_post_hook(cls._note)

    @staticmethod
    def _refuse(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Raise if ``optimizer`` was made over parameters whose gradients an engine has: it would find none, and update nothing. Raise too
        if it would update the model of an engine without an optimizer, on several ranks or a part of it.

        Raises:
            StateError: The first such parameter is named.
        """
        name = type(optimizer).__name__
        for param in _params_of(optimizer):
            if isinstance(param, (MasterPart, RestingParam)):
                raise StateError(
                    f"{name}.step(): this optimizer belongs to one that an engine steps, and its tensors have gradients only inside of "
                    "engine.step(): call that, or step() of the optimizer given to initialize(), and do other work in its step()"
                )
            owner = find_unit(param)
            training = owner[0].belongs_to() if owner is not None and owner[0].belongs_to is not None else None
            if owner is not None and owner[0].trainable and training is not None and training.trains:
                raise StateError(
                    f"{name}.step(): {owner[0].layout.slots[owner[1]].name} is trained by an engine, which has its gradients: this "
                    "optimizer would not train it. Pass it to initialize(), or prepare it in one call with the model; rates and "
                    "further param groups can be changed in engine.optimizer"
                )
            if _idle and _is_idle(param):
                found = owner[0].layout.slots[owner[1]].name if owner is not None else noted_loose(param)[1]
                raise StateError(
                    f"{name}.step(): {found} belongs to a model that was given to initialize() or accelerator.prepare() without an "
                    "optimizer. No engine averages its gradients over the ranks, so their weights would differ. Pass both in one call"
                )

    @staticmethod
    def _note(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Record the new values of an engine's untrained parameters, which the ranks compare at the engine's next step or save.

        Nothing averages the gradients of these parameters over ranks, unless the script does.
        """
        for param in _params_of(optimizer):
            if is_sharded(param) or param.grad is None:  # not updated
                continue
            if (owner := find_unit(param)) is not None:
                unit, index = owner
                if not unit.trainable and not unit.gathers and unit.collectives.topology.copies:
                    unit.written.look(index, checksum(param.data))
            elif (network := network_of_loose(param)) is not None and network.topology.copies:
                noted, name = noted_loose(param)
                noted.look(name, checksum(param.data))


def _is_idle(param: torch.Tensor) -> bool:
    """Return whether ``param`` is of a model whose engine has no optimizer, and a step over it would change this rank's copy alone."""
    owner = find_unit(param)
    if owner is None:
        network = network_of_loose(param)
        return network is not None and network in _idle and network.topology.copies and param.grad is not None
    runtime = owner[0].belongs_to() if owner[0].belongs_to is not None else None
    if runtime is None or all(found() is not runtime for found in _idle.values()):
        return False
    return is_sharded(param) or (owner[0].collectives.topology.copies and param.grad is not None)


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])
