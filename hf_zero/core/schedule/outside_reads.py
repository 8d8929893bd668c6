"""Parameters reached by other ways than their block's forward: submodules called alone, reads by modules that do not own them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from hf_zero.core.schedule.differentiation import outside_transforms, transforming
from hf_zero.core.schedule.external_parameters import external_parameters, guard, unguard
from hf_zero.core.schedule.schedule import Block
from hf_zero.core.units.empty_values import guard_state_dict
from hf_zero.core.units.unit import find_unit
from hf_zero.core.units.unprepared import HOOKED_MODULE, refuse_sharded
from hf_zero.observe import logger


class Follower(Protocol):
    """Who is told what happens: the runtime."""

    @property
    def running(self) -> bool:
        """Whether a forward or a backward runs now."""

    @property
    def backward_begun(self) -> bool:
        """Whether a backward has begun and not ended."""

    def enter(self, block: Block) -> None:
        """A forward of ``block`` begins."""

    def leave(self, block: Block, output: Any) -> None:
        """A forward of ``block`` ends."""

    def read(self, block: Block) -> None:
        """A released parameter of ``block`` is read."""


# What torch.compile does with frames of this thread now: None is nothing. Some versions of torch do not tell.
_compiling: Callable[[], Any] | None = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)


def outside_compile(function: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
    """Keeps torch.compile and torch.func out of a hook, without importing torch.compile's machinery for those who do not use it.

    Args:
        function: The hook.
        module: The module it is a forward hook of.
    """
    wrapped: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal wrapped
        # Any fused optimizer imports the machinery. Its wrapper costs more than most hooks, and where nothing compiles, nothing.
        run = function
        if "torch._dynamo.eval_frame" in sys.modules and (_compiling is None or _compiling() is not None):
            run = wrapped = wrapped or torch.compiler.disable(function)
        if not transforming():  # a context costs a microsecond, and hooks are many
            return run(*args, **kwargs)
        with outside_transforms():
            return run(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    if module is not None:
        setattr(call, HOOKED_MODULE, module)
    # torch.compile of a module that is entered through hooks would compile ``call`` as a frame of its own, once for all closures.
    frames = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(call.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT))
    return call


def add_external(reader: Block, block: Block, root: Block) -> None:
    """Remembers that ``reader`` reads parameters of ``block``: they are gathered together and stay until the end of the phase."""
    block.sticky = True
    block.read_by_root |= reader is root
    if block not in reader.externals and reader is not block:
        logger.debug("parameters of %s are read inside %s", block.name, reader.name)
        reader.externals.append(block)


class Strays:
    """Hooks on the modules that are no block, and guards on their parameters.

    Args:
        module: The user's module.
        root: Block of what belongs to no other block.
        blocks: The others.
    """

    def __init__(self, module: nn.Module, root: Block, blocks: list[Block]) -> None:
        self._module = module
        self._root = root
        self._blocks = blocks
        self._block_of_unit = {id(unit): block for block in (root, *blocks) for unit in block.units}
        self._handles: list[Any] = []

    def attach(self, follower: Follower) -> None:
        """Hooks every module with parameters of its own, guards all parameters, and resolves what was declared external."""
        hooked = {id(block.module) for block in (self._root, *self._blocks)}
        for module in self._module.modules():
            if module._parameters:
                guard_state_dict(module)
            if id(module) in hooked:
                continue
            owners = [find_unit(param) for param in module._parameters.values() if param is not None]
            if all(owner is not None and owner[0].pinned for owner in owners):
                continue  # whole for good: one rank may call it alone, as PEFT does with a prompt's embedding when it saves
            blocks = [self._block_of_unit[id(owner[0])] for owner in owners if owner and id(owner[0]) in self._block_of_unit]
            for block in {id(block): block for block in blocks}.values():
                self._hook(module, block, follower)
        guard(self._module, lambda param: self._on_sharded_read(param, follower))
        self._resolve_declared()

    def detach(self) -> None:
        """Takes hooks and guards out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        unguard(self._module)

    def _hook(self, module: nn.Module, block: Block, follower: Follower) -> None:
        alone: list[bool] = []

        def pre(called: nn.Module, *_: Any) -> None:
            if called is not module:  # a deep copy
                refuse_sharded(called)
                return
            outside = not block.open and not follower.backward_begun
            alone.append(outside)
            if outside:
                follower.enter(block)
            elif not block.unsharded:
                follower.read(block)

        def post(called: nn.Module, _args: Any, output: Any) -> None:
            if called is module and alone and alone.pop():
                follower.leave(block, output)

        self._handles.append(module.register_forward_pre_hook(outside_compile(pre, module), prepend=True))
        self._handles.append(module.register_forward_hook(outside_compile(post, module), always_call=True))

    def _on_sharded_read(self, param: nn.Parameter, follower: Follower) -> None:
        owner = find_unit(param)
        block = self._block_of_unit.get(id(owner[0])) if owner else None
        if block is not None and follower.running:
            follower.read(block)

    def _resolve_declared(self) -> None:
        for name, module in self._module.named_modules():
            for param in external_parameters(module):
                owner = find_unit(param)
                target = self._block_of_unit.get(id(owner[0])) if owner else None
                holder = self._block_around(name)
                if target is not None and target is not holder:
                    add_external(holder, target, self._root)

    def _block_around(self, name: str) -> Block:
        return next((block for block in self._blocks if name == block.name or name.startswith(f"{block.name}.")), self._root)
