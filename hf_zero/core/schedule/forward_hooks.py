"""Run functions around the forwards of a module, also when torch.compile has compiled the module.

[Note: compiled modules] ``module.compile()`` compiles hooks together with the forward. The engine's hooks communicate, so each of them
breaks the graph, and a block has a hook on each of its parts: a Llama of three layers had 14 graphs instead of 3. Therefore the hooks of a
compiled module run around the compiled call instead, and the modules inside of it lose theirs: inside their block's forward they have
nothing to do. A part that the script calls by itself is then unsharded when it reads a parameter (``GuardedParameters``).

[Note: generation and torch.compile] A layer that keeps keys and values looks for its own number in their cache, so each layer would be
another graph, once for the prompt and once for a token. torch stops at 8 graphs of one function and runs all later kinds of calls
uncompiled, those of training too. Therefore ``generate`` runs the modules as they are written (``as_written``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_zero.core.schedule.torch_internals import compiled_call, is_compiled_wrapper, outside_compile, set_compiled_call
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
        self._around: AroundCompiled | None = None
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
        self._compiled, self._around = compiled, AroundCompiled(self.module, compiled, self._before, self._after)
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


class AroundCompiled:
    """Call a compiled module with the two functions around it, outside of any graph.

    Attributes:
        as_written: Run the module's own code instead of the compiled one.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self.as_written = False
        self._module = module
        self._compiled = compiled
        self._enter, self._leave = outside_compile(before), outside_compile(after)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; its output."""
        self._enter()
        try:
            output = (self._module._call_impl if self.as_written else self._compiled)(*args, **kwargs)
        except BaseException:
            self._leave(RAISED)
            raise
        self._leave(output)
        return output


@contextmanager
def as_written(module: nn.Module) -> Iterator[None]:
    """Run the modules inside ``module`` that torch.compile has compiled as they are written, [Note: generation and torch.compile]."""
    compiled = [(inner, call) for inner in module.modules() if (call := compiled_call(inner)) is not None]
    around = [call for _, call in compiled if isinstance(call, AroundCompiled) and not call.as_written]
    plain = [(inner, call) for inner, call in compiled if not isinstance(call, AroundCompiled)]
    wrappers = [(wrapper, wrapper.__dict__["forward"]) for wrapper in module.modules() if is_compiled_wrapper(wrapper)]
    for call in around:
        call.as_written = True
    for inner, _ in plain:
        set_compiled_call(inner, None)
    for wrapper, _ in wrappers:
        wrapper.__dict__["forward"] = wrapper._orig_mod.__call__  # type: ignore[operator]
    try:
        yield
    finally:
        for call in around:
            call.as_written = False
        for inner, plain_call in plain:
            set_compiled_call(inner, plain_call)
        for wrapper, forward in wrappers:
            wrapper.__dict__["forward"] = forward
