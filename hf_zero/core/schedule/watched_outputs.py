"""Watch the tensors that blocks return, because their gradients announce the backward of a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import nn

from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.torch_internals import is_checkpointed, next_node, number_of, outside_compile, reaches, will_run


@dataclasses.dataclass
class _Forward:
    """One forward of a block whose outputs are watched. Hooks refer to this object, so it has no strong reference to the block ([Note:
    hooks of autograd hold nothing]).
    """

    block: ref[Block]
    node: Any  # autograd node of the output that was made last
    is_last: bool  # whether this node is the last that the forward made
    recomputes: bool  # whether backward recomputes the forward, see ``Block``


@dataclasses.dataclass(frozen=True)
class UnannouncedBlock:
    """A block that a backward reaches and does not announce in time.

    Attributes:
        block: The block.
        comes: Whether a gradient of one of its outputs will be known later, after functions inside the block may have run.
    """

    block: Block
    comes: bool


class WatchedForward:
    """The hook on the outputs of one forward.

    Attributes:
        block: Block of the forward; None when the model no longer exists, [Note: hooks of autograd hold nothing].
        below: The previous watched forward; None if there is none, or if the outputs above its node were freed (``_KeepsBelow``).
        is_last: Whether the forward made no autograd node after the nodes of its outputs.
        backward: Number of the last backward that it announced (with retain_graph there are several); set by the caller.
    """

    def __init__(self, block: Block, below: _Forward | None, is_last: bool, fired: Callable[[WatchedForward], None]) -> None:
        self._block = ref(block)
        self._below = None if below is None else ref(below)
        self.is_last = is_last
        self.backward = 0
        self._fired = WeakMethod(fired)

    @property
    def block(self) -> Block | None:
        """Return the block of the forward; None when the model no longer exists."""
        return self._block()

    @property
    def below(self) -> _Forward | None:
        """Return the previous watched forward."""
        return None if self._below is None else self._below()

    def __call__(self, _grad: torch.Tensor) -> None:
        fired = self._fired()
        if fired is not None and self.block is not None:
            fired(self)


@dataclasses.dataclass(frozen=True)
class _KeepsBelow:
    """The hook on outputs whose nodes are above the node of the previous watched forward: only these hooks keep it alive.

    A forward may also return tensors from below that node, as a model returns the keys and values of all its layers. A hook on one of them
    that referred to the node would close a cycle through autograd's graph, which Python's garbage collector cannot see.
    """

    watched: WatchedForward
    below: _Forward

    def __call__(self, grad: torch.Tensor) -> None:
        self.watched(grad)


class WatchedOutputs:
    """Hooks on the outputs of blocks, and the prediction which of the hooks the running backward will call.

    [Note: announced backwards] autograd has no event for the beginning of a block's backward, so hooks on the tensors that its forward
    returned announce it. Backward runs the nodes of a graph in the reverse of the order in which they were made. So the first gradient of
    an output is known before any node of the forward runs, provided that the output was the last thing that the forward made and is used.
    There are three exceptions:

    - The caller changes an output in place that is a view: autograd gives it another node, and the hook stays with the old one, which no
      backward reaches. When the next block begins or ends, the hook is registered on the new node too.
    - The loss is computed from tensors that a hook or an attribute has taken out of the block, and the output is not used, or was not made
      last. If no output of a block shows that a backward has begun, outputs of modules with parameters inside a block do
      (``BackwardPhase.watch_part``). When backward begins, ``find_unannounced`` asks the nodes of the outputs whether backward will reach
      them. A block that no hook announces in time is unsharded together with the one before it in backward's order, which is at most as
      early as a prefetch.
    - The forward has recorded operations and returned no tensor that can be found (an object with slots of its own, a closure). The time of
      its backward is unknown, so the block is *silent*: tensors that autograd saved keep their memory until backward is over.

    Only hooks above a node refer to it (``_KeepsBelow``), so a graph is freed together with its outputs.

    Args:
        root: Block of the modules that belong to no other block.
    """

    def __init__(self, root: Block) -> None:
        self._root = root
        self._hooks: WeakSet[WatchedForward] = WeakSet()  # they live as long as the graph
        self._earlier: list[WeakSet[WatchedForward]] = []  # those that were cleared: one set for each iteration whose graph still lives
        self._last: _Forward | None = None  # the forward watched last, inside the running forward of the complete module
        self._last_output: Callable[[], torch.Tensor | None] = lambda: None
        self._last_hook: Callable[[torch.Tensor], None] | None = None

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def clear(self) -> None:
        """Clear all watched outputs at the end of an iteration."""
        self._earlier = [hooks for hooks in (*self._earlier, self._hooks) if hooks]
        self._hooks = WeakSet()
        self._forget_last()

    def _forget_last(self) -> None:
        self._last = self._last_hook = None
        self._last_output = lambda: None

    def left(self, block: Block, output: Any, fired: Callable[[WatchedForward], None]) -> None:
        """Watch the ``output`` of a forward of ``block`` that autograd may have recorded.

        Args:
            block: The block.
            output: The return value of the forward, of any type.
            fired: Called each time a gradient of one of the outputs is known.
        """
        self.follow()
        below = self._last
        self._forget_last()
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None and number_of(tensor.grad_fn) >= block.first_node]
        if not tensors:
            if block is not self._root and next_node() > block.first_node:
                block.unwatched()
                self._last = below
            return
        newest = max(tensors, key=lambda tensor: number_of(tensor.grad_fn))
        is_last = number_of(newest.grad_fn) == next_node() - 1
        watched = WatchedForward(block, below, is_last, fired)
        hook = outside_compile(watched)
        above = hook if below is None else outside_compile(_KeepsBelow(watched, below))
        for tensor in tensors:
            lower = below is not None and number_of(tensor.grad_fn) <= number_of(below.node)
            tensor.register_hook(hook if lower else above)
        recomputes = is_checkpointed()
        block.watched(recomputes)
        self._hooks.add(watched)
        if block is not self._root and self._root.open:
            self._last, self._last_output, self._last_hook = _Forward(ref(block), newest.grad_fn, is_last, recomputes), ref(newest), above

    def follow(self) -> None:
        """Move the hook to the new node of the last block's output, if the caller has changed the output in place."""
        output, last, hook = self._last_output(), self._last, self._last_hook
        if output is not None and last is not None and hook is not None and output.grad_fn is not last.node and output.grad_fn is not None:
            output.register_hook(hook)
            last.node = output.grad_fn

    def find_unannounced(self, blocks: Iterable[Block]) -> list[UnannouncedBlock]:
        """Return the ``blocks`` that the running backward reaches without announcing them before functions inside them may run.

        Must be called inside the backward. Blocks that it does not reach are notified (``Block.mark_without_gradient``).
        """
        alive: dict[int, list[WatchedForward]] = {}
        nodes: dict[int, list[_Forward]] = {}
        for hook in self._hooks:
            alive.setdefault(id(hook.block), []).append(hook)
            if hook.below is not None:
                nodes.setdefault(id(hook.below.block()), []).append(hook.below)
        found = []
        for block in blocks:
            if not block.pending or block is self._root:
                continue
            hooks, below = alive.get(id(block), ()), nodes.get(id(block), ())
            coming = [forward for forward in below if will_run(forward.node)]
            unknown = len(hooks) - len(below)  # forwards above which nothing was watched
            if not (coming or _is_reached(block)):
                block.mark_without_gradient()
            elif len(hooks) < block.pending or len(coming) < len(below) or not all(hook.is_last for hook in hooks):
                found.append(UnannouncedBlock(block, comes=bool(coming) or unknown > 0))
        self._expect_again()
        return found

    def _expect_again(self) -> None:
        """Count the forwards of earlier graphs that the running backward reaches once more (``retain_graph``).

        Otherwise a block that it reaches out of the pass's order would be resharded before, and unsharded again on this rank alone.
        """
        lower = {id(hook.below): hook.below for hooks in self._earlier for hook in hooks}
        for forward in lower.values():
            if forward is not None and will_run(forward.node) and (block := forward.block()) is not None:
                block.watched(forward.recomputes)


def _is_reached(block: Block) -> bool:
    """Return whether the running backward may reach ``block``; True for a block whose parameters are frozen, because it is unknown."""
    trained = [param for entry in block.gradients for param in entry.unit.params if param is not None]
    return not trained or bool(block.checkpointed) or reaches(trained)


def tensors_in(value: Any, _depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, mappings, dataclasses (``ModelOutput`` is one) and attributes of other objects.

    torch's pytree does not look into dataclasses and objects that are not registered with it, where scripts keep outputs as well.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, _depth)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, _depth)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), _depth)
    elif _depth < _DEEPEST and not isinstance(value, (str, bytes, int, float, type(None), type, nn.Module)):
        for item in _attributes(value):
            yield from tensors_in(item, _depth + 1)


_DEEPEST = 3  # number of nesting levels of objects that are searched


def _attributes(value: Any) -> Iterator[Any]:
    """Yield the attributes of an object of a user's class, from its dict and its slots."""
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(value, name, None)
