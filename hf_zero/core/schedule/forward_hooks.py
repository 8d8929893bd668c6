"""Run functions around the forwards of a module, also when torch.compile has compiled the module.

[Note: compiled modules] ``module.compile()`` compiles hooks together with the forward. The engine's hooks communicate, so each of them
breaks the graph, and a block has a hook on each of its parts: a Llama of three layers had 14 graphs instead of 3. Therefore the hooks of a
compiled module run around the compiled call instead, and the modules inside of it lose theirs: inside their block's forward they have
nothing to do. A part that the script calls by itself is then unsharded when it reads a parameter (``GuardedParameters``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_zero.core.schedule.torch_internals import compiled_call, outside_compile, set_compiled_call
from hf_zero.core.units.guards import refuse_sharded

RAISED = object()  # takes the place of the output of a forward that raised


class ForwardHooks:
    """Call ``before`` and ``after`` around forwards of ``module``; ``after`` gets the output, or ``RAISED``.

    A deep copy of the module takes the hooks along, and belongs to no engine: it refuses to run on sharded parameters.

    Args:
        module: The module.
        before: Called when a forward begins.
        after: Called when it ends.
        parts: Hooks of modules inside of ``module``, which only act on forwards of the parts by themselves.
    """

    def __init__(
        self, module: nn.Module, before: Callable[[], None], after: Callable[[Any], None], parts: list[ForwardHooks] | None = None
    ) -> None:
        self.module = module
        self.parts = parts if parts is not None else []
        self._before = before
        self._after = after
        self._compiled: Callable[..., Any] | None = None  # torch's own, while ``_around`` stands in its place
        self._around: Callable[..., Any] | None = None
        self._handles = self._register()

    def _register(self) -> list[RemovableHandle]:
        module, before, after = self.module, self._before, self._after
        handled: BaseException | None = None  # the exception that the caller of the forward is handling

        def pre(called: nn.Module, *_: Any) -> None:
            nonlocal handled
            if called is module:
                handled = sys.exc_info()[1]
                before()
            else:
                refuse_sharded(called)

        def post(called: nn.Module, _args: Any, output: Any) -> None:
            nonlocal handled
            if called is module:  # torch passes None for a forward that raised, and for one that returned None
                raised = output is None and sys.exc_info()[1] is not handled
                handled = None
                after(RAISED if raised else output)

        return [
            module.register_forward_pre_hook(outside_compile(pre, module), prepend=True),
            module.register_forward_hook(outside_compile(post, module), always_call=True),
        ]

    def follow_compile(self) -> None:
        """Move out of the graph if torch.compile has compiled the module since the last call, [Note: compiled modules]."""
        compiled = compiled_call(self.module)
        if compiled is self._around:
            return
        self._unregister()
        if compiled is None:
            self._compiled = self._around = None
            self._handles = self._register()
            return
        self.drop_parts()
        self._compiled, self._around = compiled, _around(compiled, self._before, self._after)
        set_compiled_call(self.module, self._around)

    @property
    def compiled(self) -> bool:
        """Return whether the hooks run around a compiled call."""
        return self._around is not None

    def drop_parts(self, modules: Collection[int] | None = None) -> None:
        """Remove the hooks of the parts.

        Args:
            modules: Ids of the modules whose hooks are removed; None removes all.
        """
        dropped = [part for part in self.parts if modules is None or id(part.module) in modules]
        for part in dropped:
            part.remove()
            self.parts.remove(part)

    def _unregister(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def remove(self) -> None:
        """Remove the hooks; a compiled module stays compiled."""
        self._unregister()
        if self._around is not None and compiled_call(self.module) is self._around:
            set_compiled_call(self.module, self._compiled)
        self._compiled = self._around = None


def _around(compiled: Callable[..., Any], before: Callable[[], None], after: Callable[[Any], None]) -> Callable[..., Any]:
    """Return ``compiled`` with the two calls around it, outside of any graph."""
    enter, leave = outside_compile(before), outside_compile(after)

    def call(*args: Any, **kwargs: Any) -> Any:
        enter()
        try:
            output = compiled(*args, **kwargs)
        except BaseException:
            leave(RAISED)
            raise
        leave(output)
        return output

    return call
