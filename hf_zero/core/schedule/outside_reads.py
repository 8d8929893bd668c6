"""Unshard parameters that are read outside of their block's forward: by submodules called alone, by modules that do not own them, by a
loss.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_zero.core.schedule.backward_phase import BackwardPhase
from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.forward_hooks import RAISED, ForwardHooks
from hf_zero.core.schedule.gathered_parameters import external_parameters
from hf_zero.core.schedule.schedule import ForwardPhase
from hf_zero.core.schedule.torch_internals import in_backward, outside_recording, outside_transforms, replace_parameters
from hf_zero.core.units.divided import PartsInLoss
from hf_zero.core.units.grouping import enclosing
from hf_zero.core.units.guards import guard_state_dict
from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.marks import WholeReader, Wholes, whole_reader_of
from hf_zero.core.units.sharded_parameter import OWNER, ShardedParameter
from hf_zero.core.units.unit import Unit, find_unit, is_sharded
from hf_zero.observe import note


class GuardedParameters(dict[str, Any]):
    """The parameters of one module by name; each read of a sharded parameter calls back, and a tensor-parallel shard may be replaced.

    ``module.weight`` looks the name up here; iteration (``named_parameters``, ``state_dict``) does not.
    """

    def __init__(
        self,
        content: dict[str, Any],
        on_sharded: Callable[[nn.Parameter], None],
        show: Callable[[str, nn.Parameter], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(content)
        self._on_sharded = on_sharded
        self._show = show

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        # Same as `is_sharded`, but with one lookup: every read of a parameter in a forward calls this method.
        owner = None if param is None else getattr(param, OWNER, None)
        if owner is not None and owner[0].state is not UnitState.UNSHARDED and owner[1] not in owner[0].alone:
            self._on_sharded(param)
        if self._show is not None and param is not None:
            return self._show(name, param)
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: deepcopy(param, memo) for name, param in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


class OutsideReads:
    """Hooks on the modules that are not blocks, and guards on their parameters.

    Args:
        module: The user's module.
        root: Block of the modules that belong to no other block.
        blocks: The other blocks.
        forward: Unshards blocks for reads in a forward.
        backward: Unshards blocks for reads in a recomputation.
        parts: Parameters that a model axis divides.
    """

    def __init__(
        self, module: nn.Module, root: Block, blocks: list[Block], forward: ForwardPhase, backward: BackwardPhase, parts: PartsInLoss
    ) -> None:
        self._module = module
        self._root = root
        self._blocks = {block.name: block for block in blocks}
        self._forward = forward
        self._backward = backward
        self._block_of_unit = {id(unit): block for block in (root, *blocks) for unit in block.units}
        self._parts = parts
        self._wholes: Wholes = {}  # complete tensors of tensor-parallel shards, while a forward runs
        self.parts: dict[int, list[ForwardHooks]] = {}  # by the id of their block's module

    def attach(self, enter: Callable[[Block], None], leave: Callable[[Block, Any], None]) -> None:
        """Hook every module with parameters of its own, guard all parameters, and resolve declared external parameters.

        Args:
            enter: Called when a part of a block is called by itself, outside the block's forward.
            leave: Called with the block and the output, or ``RAISED``, when the forward of such a part ends.
        """
        hooked = {id(block.module) for block in (self._root, *self._blocks.values())}
        guarded = [module for module in self._module.modules() if module._parameters]
        for module in guarded:
            guard_state_dict(module)
            if id(module) in hooked:
                continue
            owners = [find_unit(param) for param in module._parameters.values() if param is not None]
            if all(owner is not None and owner[0].pinned for owner in owners):
                continue  # always unsharded: one rank may call it alone, as PEFT does to save a prompt's embedding
            blocks = [self._block_of_unit[id(owner[0])] for owner in owners if owner and id(owner[0]) in self._block_of_unit]
            for block in {id(block): block for block in blocks}.values():
                self._hook(module, block, enter, leave)
        for module in guarded:
            self._guard(module)
        self._resolve_declared()

    def guard_parts(self) -> None:
        """Guard tensor-parallel shards where no parameter is sharded by ZeRO: code that reads them outside of their module's forward gets
        the complete tensor.
        """
        for module in self._module.modules():
            if whole_reader_of(module) is not None:
                self._guard(module)
        if self._parts:
            for module in self._around_blocks():
                self._show_after(module)

    def _around_blocks(self) -> list[nn.Module]:
        """Return the modules between the root and the blocks (``model.model``), which scripts call by themselves."""
        modules = dict(self._module.named_modules())
        parents = {path: path.rpartition(".")[0] for path in modules}
        above, paths = set[str](), {parents[path] for path in self._blocks}
        while paths := paths - above - {""}:
            above |= paths
            paths = {parents[path] for path in paths}
        return [modules[path] for path in sorted(above) if not isinstance(modules[path], (nn.ModuleList, nn.ModuleDict))]

    def _show_after(self, module: nn.Module) -> None:
        """Let a loss compute with whole parameters after a forward of ``module`` by itself, with gradients; local."""

        def alone() -> bool:
            return not (self._root.open or self._backward.begun)

        def before() -> None:
            if alone():
                self._parts.hide()

        def after(output: Any) -> None:
            if alone() and torch.is_grad_enabled() and output is not RAISED:
                self._parts.show()

        self.parts.setdefault(id(self._root.module), []).append(ForwardHooks(module, before, after))

    def end_forward(self) -> None:
        """Drop the complete tensors, and show those of divided parameters to a loss that may follow; local."""
        self._wholes.clear()
        if self._backward.begun:
            return
        if self._backward.awaited:  # also after a forward without gradients, such as a reference's, beside one with them
            self._parts.show()
        else:
            self._parts.rest()

    def _guard(self, module: nn.Module) -> None:
        reader = whole_reader_of(module)
        show = None if reader is None else partial(self._shown, reader)
        replace_parameters(module, GuardedParameters(dict(module._parameters.items()), self._on_sharded_read, show))

    def detach(self) -> None:
        """Remove hooks and guards."""
        self._parts.hide()
        for hooks in self.parts.values():
            for hook in hooks:
                hook.remove()
        self.parts = {}
        for module in self._module.modules():
            if isinstance(module._parameters, GuardedParameters):
                replace_parameters(module, dict(module._parameters.items()))

    def _hook(self, module: nn.Module, block: Block, enter: Callable[[Block], None], leave: Callable[[Block, Any], None]) -> None:
        by_itself: list[bool] = []  # for each running forward, whether no forward of its block runs

        def before() -> None:
            outside = not block.open and not self._backward.begun
            by_itself.append(outside)
            if outside:
                enter(block)
            elif not block.unsharded:
                self._read(block)

        def after(output: Any) -> None:
            if by_itself and by_itself.pop():
                leave(block, output)
            elif output is not RAISED:
                self._backward.watch_part(output)

        self.parts.setdefault(id(block.module), []).append(ForwardHooks(module, before, after))

    def _on_sharded_read(self, param: nn.Parameter) -> None:
        block = self._block_of(param)
        if block is None or not self._wants_values():
            return
        if self._is_behind():
            show_unit_placeholders(param, self._unshard_for_use)
        else:
            self._read(block)

    def unshard_for_use(self, param: nn.Parameter) -> bool:
        """Unshard ``param`` if the model's forward, its loss or a recomputation computes with it, and return whether it is unsharded.

        Code that iterates over ``named_parameters()`` (a penalty on all weights) looks no attribute up, so no guard notices its reads.
        Collective where it unshards.
        """
        if not self._wants_values():
            return False
        self._unshard_for_use(param)
        return not is_sharded(param)

    def _unshard_for_use(self, param: nn.Parameter) -> None:
        """Unshard ``param`` for code that computes with it outside of its block's forward, perhaps in a later forward or backward;
        collective.
        """
        block = self._block_of(param)
        if block is None:
            return
        note("external", block.name)
        with outside_transforms(), outside_recording():
            if self._is_behind() or not self._wants_values():
                block.read_by(self._root, self._root)
                self._forward.read_behind(block)
            else:
                self._read(block)
        if self._is_behind() and self._wants_values():
            self._parts.show()

    def _is_behind(self) -> bool:
        return not (self._forward.stack or self._backward.begun)

    def _wants_values(self) -> bool:
        """Return whether the reader of a parameter will compute with it: in a forward, in the loss after it, or in backward."""
        if self._forward.stack or (self._backward.begun and in_backward()):
            return True
        return not self._backward.begun and (self._backward.awaited or self._parts.shown) and torch.is_grad_enabled()

    def _shown(self, reader: WholeReader, name: str, param: nn.Parameter) -> torch.Tensor:
        """Return the tensor-parallel shard ``param``, or the complete tensor if code outside of its module computes with it (then
        collective).
        """
        if is_sharded(param) or not self._wants_values():
            return param
        whole = reader(name, param, self._wholes if self._forward.stack else {})
        return param if whole is None else whole

    def _read(self, block: Block) -> None:
        """Unshard ``block``, which another module reads, and record the reader; collective."""
        note("external", block.name)
        block.read_by(self._forward.stack[-1] if self._forward.stack else self._root, self._root)
        with outside_transforms(), outside_recording():
            if self._backward.begun:
                self._backward.advance(block)
            else:
                self._forward.unshard(block)

    def _resolve_declared(self) -> None:
        for name, module in self._module.named_modules():
            for param in external_parameters(module):
                target, holder = self._block_of(param), self._block_around(name)
                if target is not None and target is not holder:
                    target.read_by(holder, self._root)

    def _block_of(self, param: nn.Parameter) -> Block | None:
        owner = find_unit(param)
        return self._block_of_unit.get(id(owner[0])) if owner else None

    def _block_around(self, name: str) -> Block:
        around = enclosing(name, self._blocks)
        return self._root if around is None else self._blocks[around]


# Functions that need no values, by name.
_LOOKS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "get_device", "__len__", "__hash__", "__dir__"),
        *(
            "is_floating_point",
            "is_complex",
            "is_contiguous",
            "is_signed",
            "is_conj",
            "is_neg",
            "is_inference",
            "is_same_size",
            "has_names",
        ),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    )
)
_VALUES = frozenset(("T", "mT", "H", "mH", "data", "real", "imag"))  # attributes that are values


class LateParameter(ShardedParameter):
    """A parameter that shows a placeholder until some code computes with it.

    [Note: late values] ``model.head.weight`` in a loss after the forward needs values, and ``model.head.weight.dtype`` in a log does not; a
    gather on one rank, for its log, would be matched with the next gather of the other ranks. Both begin with the same attribute lookup, so
    the lookup only points the parameter at a tensor of its shape and gives it this class, both without communication, and
    ``__torch_function__`` reports the first operation on it. A gather or a reshard, which points the parameter elsewhere, restores its
    class.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Unshard first, unless ``func`` needs no values."""
        if not _only_looks(func):
            found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LateParameter)]
            for leaf in found:
                _unshard_for_use(leaf)
            if not any(isinstance(leaf, LateParameter) for leaf in found):
                return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def show_unit_placeholders(param: nn.Parameter, unshard_for_use: Callable[[nn.Parameter], None]) -> None:
    """Show ``param``, which is sharded, and all parameters of its unit as placeholders; local.

    Args:
        param: The parameter.
        unshard_for_use: Function that unshards a parameter of the unit; called with it when code computes with it.
    """
    owner = find_unit(param)
    if owner is None:
        return
    unit, _ = owner
    _unsharders[unit] = unshard_for_use
    unit.show_placeholders()
    for other in unit.params:
        if other is not None and is_sharded(other) and type(other) is nn.Parameter:
            other.__class__ = LateParameter


_unsharders: WeakKeyDictionary[Unit, Callable[[nn.Parameter], None]] = WeakKeyDictionary()


def _unshard_for_use(param: LateParameter) -> None:
    owner = find_unit(param)
    unshard_for_use = _unsharders.get(owner[0]) if owner is not None else None
    if unshard_for_use is not None and is_sharded(param):
        unshard_for_use(param)


def _only_looks(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUES or name != "__get__"
    return name in _LOOKS
