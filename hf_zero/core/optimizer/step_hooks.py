"""Call the hooks that scripts register on steps of torch optimizers once for each update of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

_BEFORE, _AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"  # attributes of an optimizer
_ALL_BEFORE, _ALL_AFTER = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"  # those of all optimizers of the process

own_hooks: list[Callable[..., Any]] = []  # hooks of this library on all optimizers, which are no hooks of a script


class _Deferred:
    """The hooks that torch's ``step`` finds while an engine calls it: none. Registering and removing a hook change the hooks themselves.

    Attributes:
        instead: Hooks that are found.

    Args:
        hooks: The hooks, by the key of their handle.
    """

    def __init__(self, hooks: MutableMapping[int, Any]) -> None:
        self.hooks = hooks
        self.instead: tuple[Any, ...] = ()

    def values(self) -> Iterable[Any]:
        """Return the hooks that torch calls."""
        return self.instead

    def __setitem__(self, key: int, hook: Any) -> None:
        self.hooks[key] = hook

    def __contains__(self, key: object) -> bool:
        return key in self.hooks

    def __delitem__(self, key: int) -> None:
        del self.hooks[key]


_deferred: dict[str, _Deferred] = {}  # one for each kind of hooks on all optimizers: handles refer to it weakly


def _places(optimizer: torch.optim.Optimizer) -> list[tuple[Any, str]]:
    """Return holders and names of all hooks; a wrapper that does not call torch's constructor has none of its own."""
    places = [(optimizer, _BEFORE), (optimizer, _AFTER), (torch_optimizer, _ALL_BEFORE), (torch_optimizer, _ALL_AFTER)]
    return [(holder, name) for holder, name in places if hasattr(holder, name)]


@contextmanager
def deferred(optimizer: torch.optim.Optimizer, instead: Any = None) -> Iterator[None]:
    """Make steps inside the ``with`` call no hook, or only the pre-step hook ``instead``. Steps outside call the script's hooks.

    An engine may step parts of a script's optimizer one by one, and torch would call the hooks for each part. Post-step hooks wait until
    the model's parameters have their new values: values that a hook wrote to them before would be replaced by those of the masters.
    """
    with ExitStack() as stack:
        for holder, name in _places(optimizer):
            hooks = getattr(holder, name)
            if isinstance(hooks, _Deferred):  # another optimizer is stepped inside a hook
                continue
            kept = _deferred if holder is torch_optimizer else vars(holder).setdefault("_hf_zero_hooks", {})
            found = kept.get(name)
            if found is None or found.hooks is not hooks:
                found = kept[name] = _Deferred(hooks)
            found.instead = (instead,) if instead is not None and name == _BEFORE else ()
            setattr(holder, name, found)
            stack.callback(setattr, holder, name, hooks)
        yield


@contextmanager
def usual(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo ``deferred`` inside the ``with``."""
    with ExitStack() as stack:
        for holder, name in _places(optimizer):
            found = getattr(holder, name)
            if isinstance(found, _Deferred):
                setattr(holder, name, found.hooks)
                stack.callback(setattr, holder, name, found)
                stack.callback(setattr, found, "instead", found.instead)
        yield


def hooks_before(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the script's pre-step hooks on all optimizers, then those on ``optimizer``, in torch's order; not inside ``deferred``."""
    shared = [hook for hook in getattr(torch_optimizer, _ALL_BEFORE).values() if hook not in own_hooks]
    return [*shared, *getattr(optimizer, _BEFORE).values()]


def hooks_after() -> list[Any]:
    """Return the script's post-step hooks on all optimizers; not inside ``deferred``."""
    return [hook for hook in getattr(torch_optimizer, _ALL_AFTER).values() if hook not in own_hooks]


def call_before(optimizer: torch.optim.Optimizer, hooks: Iterable[Any]) -> None:
    """Call pre-step ``hooks`` for ``optimizer``.

    Raises:
        RuntimeError: A hook returns other arguments for ``step``, which takes none here.
    """
    for hook in hooks:
        if hook(optimizer, (optimizer,), {}) not in (None, ((optimizer,), {})):
            raise RuntimeError(f"a step pre-hook returned other arguments for step(): return None, {hook!r} did not")
