"""Define the optimizer that users hold: it steps the inner torch optimizer over this rank's segments of the masters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import ref

import torch

from hf_zero.core.optimizer import step_hooks
from hf_zero.core.optimizer.clones import build_anew, is_mark, state_at_start
from hf_zero.core.optimizer.common_states import common_states, set_common_states, states_by_param
from hf_zero.core.optimizer.nested import complete, join_states, load_together, name_states, set_state
from hf_zero.core.optimizer.own_object import OwnObject, missing_attribute, once
from hf_zero.core.optimizer.param_states import ParamStates, SegmentStates
from hf_zero.core.optimizer.segments import OwnedSegment, Segments, lay_out
from hf_zero.core.optimizer.state_store import StateStore
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.errors import ConfigError, StateError

T = TypeVar("T")
REPLACES = "_hf_zero_replaces"
"""Attribute of an inner optimizer: the script's optimizer whose place it takes, which a scheduler of the script holds."""


class RankMemory(Protocol):
    """Tensors that a rank keeps between steps besides masters and optimizer states."""

    def rank_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the vectors of this rank: kind -> name -> (n,)."""

    def load_rank_states(self, states: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restore the result of ``rank_states``."""


_PARTS = "hf_zero_parts"  # key of a state_dict: the parts of parameters that it is of
_STARTS = "hf_zero_starts"  # key of a state_dict: unit, param group and first element of each segment


class ShardedOptimizer(torch.optim.Optimizer):
    """Torch optimizer over flat master shards.

    The inner optimizer is the user's own object (or the one that the configuration names): its ``param_groups`` stay live, so a learning
    rate changed by hand or by any scheduler takes effect at the next step. Only the contents of the groups are replaced: segments of this
    rank's masters in place of the model's parameters.

    Attributes:
        inner: The torch optimizer that does the arithmetic.
        units: Trainable units.
        segments: Segments that ``inner`` updates, in order.
        state_store: Store of masters and moments.
        memory: Tensors that the gradient exchange keeps between steps; None if there are none.
        overflow: Whether the last step was skipped for a gradient that is not finite.
        cut_segments: Whether parameters in one segment's range may have different step counts; the same on all ranks.
        own: Methods of ``inner`` that scripts may call.
        given: The parameters of each param group, in the order in which the script gave them.
        load_plain: Function that loads the state of a plain torch optimizer, and returns "", or why it has loaded nothing; None without.
        called: Whether a call of ``step`` runs, by a script that steps this object or the inner optimizer, and not the engine.
        norm: Norm of all gradients in the last step, before clipping, 0-dim tensor, inf if that step was skipped; None before the first.

    Args:
        inner: Any torch optimizer whose update of an element depends on that element alone.
        units: Trainable units.
        state_store: Store of masters and moments; None keeps them on the training device.
    """

    adapts = True  # whether ``rest`` and ``extend`` are provided

    def __init__(self, inner: torch.optim.Optimizer, units: Sequence[Unit], state_store: StateStore | None = None) -> None:
        # Not super().__init__: groups and state belong to the inner optimizer, and must stay the same objects.
        self.inner = inner
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self.units = list(units)
        self.state_store = state_store or StateStore()
        self.memory: RankMemory | None = None
        self.cut_segments = False
        self._excluded: Mapping[int, Collection[int]] = {}  # positions of parameters that are not updated, by id of their unit
        self.overflow = False
        self.norm: torch.Tensor | None = None
        self._step: Callable[[], None] | None = None
        self._clear: Callable[[], None] | None = None
        self._take: Callable[[], object] | None = None  # the step that waits for a script's own ``step``
        self.called = False
        complete(inner)
        join_states(inner)
        self.own = OwnObject(inner)
        self.given = [list(group["params"]) for group in inner.param_groups]
        self.load_plain: Callable[[ShardedOptimizer, Mapping[str, Any]], str] | None = None
        self.segments = Segments()
        for group, tensors in zip(inner.param_groups, self._lay_out(), strict=True):
            group["params"] = tensors
        self.state_store.bind(inner, self.units, self.segments)
        if states_by_param(inner):  # state that its constructor made for the parameters, which the segments replace
            common = common_states(inner)
            set_state(inner, _state_at_start(inner))
            set_common_states(inner, common)
            self.state_store.adopt_states()
        name_states(inner)
        watch_parts(self)

    def _lay_out(self) -> list[list[torch.Tensor]]:
        """Create ``segments``; return the tensors that each group of the inner optimizer holds in place of the model's parameters."""
        self.segments = lay_out(self.inner, self.units, self.state_store.ranges)
        groups = range(len(self.inner.param_groups))
        return [[segment.tensor for segment in self.segments if segment.group == index] for index in groups]

    # -- what is trained, see [Note: trained parameters] ------------------------------------------------------------------------

    def group_of_tensors(self) -> dict[int, int]:
        """Return the param group of each tensor that the inner optimizer holds in place of the model's parameters, by id."""
        return {id(segment.tensor): segment.group for segment in self.segments}

    def can_rest(self, unit: Unit) -> bool:
        """Return whether single parameters of ``unit`` can be frozen while others are trained."""
        return self.state_store.divides(unit)

    def rest(self, resting: Mapping[int, Collection[int]], unreduced: Collection[int]) -> None:
        """Exclude parameters from updates, and train all others; local.

        Args:
            resting: Positions of the parameters, by id of their unit.
            unreduced: Ids of the units that no step reduces or updates, because all of their parameters rest.
        """
        self.state_store.settle()
        self._excluded = resting
        self._replace(piece for segment in self.segments for piece in segment.divide(resting.get(id(segment.unit), ())))
        self.cut_segments |= any(resting.values())
        for unit in self.units:
            unit.rests = id(unit) in unreduced

    def cut(self, starts: Mapping[int, Iterable[int]]) -> None:
        """Cut segments at element positions inside them (``starts``: positions by id of the segment's tensor), so that each part counts its
        own steps; local.
        """
        self.state_store.settle()
        self._replace(piece for segment in self.segments for piece in segment.cut_at(starts.get(id(segment.tensor), ())))
        self.cut_segments = True

    def extend(self, units: Sequence[Unit]) -> None:
        """Train further ``units``, without state before their first update; collective if complete tensors have owners."""
        self.state_store.settle()
        self.units += units
        added = lay_out(self.inner, units, self.state_store.ranges)
        has_state = bool(self.inner.state)
        self._replace([*self.segments, *added])
        for segment in added if has_state else ():
            segment.install(state_at_start(self.inner, segment.group, segment.tensor))

    def _replace(self, segments: Iterable[OwnedSegment]) -> None:
        self.segments = Segments(segments)
        for index, group in enumerate(self.inner.param_groups):
            group["params"] = [segment.tensor for segment in self.segments if segment.group == index]
        self.state_store.bind(self.inner, self.units, self.segments)
        watch_parts(self)

    # -- life ---------------------------------------------------------------------------------------------------------

    def connect(self, step: Callable[[], None] | None, clear: Callable[[], None] | None, waits: Callable[[], bool] = bool) -> None:
        """Set the functions that ``step`` and ``zero_grad`` of this optimizer call, and of the inner one if a script calls them; ``waits``
        returns whether gradients wait for a step.
        """
        self._step, self._clear, self.own.parts.waits = step, clear, waits
        if clear is None:
            vars(self.inner).pop("zero_grad", None)
        else:
            vars(self.inner)["zero_grad"] = _clearing(ref(self))
        if step is None:
            self.own.disconnect()
        else:
            self.own.connect(self)

    def free_states(self) -> None:
        """Free state and segments, and empty the groups."""
        self.connect(None, None)
        self.state_store.close()
        self.inner.state.clear()
        self.segments, self.units, self.given = Segments(), [], []
        self.own.parts.watch(())
        for group in self.inner.param_groups:
            group["params"] = []

    def update(self, shards: Sequence[torch.Tensor], factor: torch.Tensor, updated: Callable[[Unit], None]) -> None:
        """Update masters and shards once with this rank's gradients, (shard_numel,) per unit, times ``factor`` (0-dim).

        ``updated`` is called with each unit, in order, when its shard has its new value, and may be collective; everything else is local.
        """
        self.state_store.before_step = self.own.before_step(whole=False)
        with self.own.updating():
            self.state_store.update(shards, factor, updated)
        # torch's schedulers read this attribute before they warn that they were stepped before the optimizer. A script's scheduler has the
        # inner optimizer, whose own `step` is not always the method that updates, or one that it replaces.
        inner: Any = self.inner
        self._opt_called = inner._opt_called = getattr(inner, REPLACES, inner)._opt_called = True

    def end_step(self) -> None:
        """Call the script's post-step hooks, when all parameters have their new values: the inner optimizer's, this one's, then those on
        all optimizers.
        """
        for optimizer in (self.inner, self):
            for hook in (*optimizer._optimizer_step_post_hooks.values(),):
                hook(optimizer, (optimizer,), {})
        for hook in step_hooks.hooks_after():
            hook(self.inner, (self.inner,), {})

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Finish the reduction, clip and update, like the engine's ``step``; for callers that step the optimizer.

        Raises:
            StateError: The engine was destroyed.
        """
        loss = closure() if closure is not None else None
        if self._take is not None:
            self._take()
            return loss
        if self._step is None:
            raise StateError("this optimizer belongs to no engine any more (destroy() was called)")
        self.called = True
        try:
            self._step()
        finally:
            self.called = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients for the coming step, like the engine's ``zero_grad``."""
        if self._clear is not None:
            self._clear()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the inner optimizer's groups, live."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the inner optimizer's state, by segment; waits for a running update."""
        self.state_store.settle()
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """Begin anew, as scripts do with ``optimizer.state = defaultdict(dict)``.

        Raises:
            StateError: ``value`` has entries.
        """
        if value:
            raise StateError(
                f"optimizer.state was assigned {len(value)} entries, but the engine keeps the states of flat parts of its parameters "
                "there. An empty dict begins anew; load_checkpoint() and hf_zero.utils.safe_set_full_optimizer_state set states"
            )
        self.state.clear()

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the inner optimizer's defaults."""
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return this rank's part of the state. To save a run use ``save_checkpoint``, which any number of ranks can read."""
        for before in (*self._optimizer_state_dict_pre_hooks.values(),):
            before(self)
        state = {**self._own_state_dict(), _PARTS: self.param_states.parts(), _STARTS: self.segments.starts}
        for after in (*self._optimizer_state_dict_post_hooks.values(),):
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def _own_state_dict(self) -> dict[str, Any]:
        self.state_store.settle()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Restore a ``state_dict`` of the same rank and world size, or one of a plain torch optimizer, which every rank loads.

        Raises:
            StateError: The state is of other parts of the parameters than this rank's, or of a plain optimizer that does not fit.
        """
        state = dict(state_dict)
        for before in (*self._optimizer_load_state_dict_pre_hooks.values(),):
            changed = before(self, state)
            state = state if changed is None else changed
        if not _load_if_plain(self, state):
            starts = state.get(_STARTS, self.segments.starts)
            if starts != self.segments.starts:
                _cut_anew(self, starts)
            self._load_own_state_dict({name: value for name, value in state.items() if name not in (_PARTS, _STARTS)})
            if self.segments:
                self._replace(piece for segment in self.segments for piece in segment.divide(self._excluded.get(id(segment.unit), ())))
        for after in (*self._optimizer_load_state_dict_post_hooks.values(),):
            after(self)

    def _load_own_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state_store.settle()
        tensors = [group["params"] for group in self.inner.param_groups]
        load_together(self.inner, state_dict)
        name_states(self.inner)
        for group, params in zip(self.inner.param_groups, tensors, strict=True):
            group["params"] = params
        self.state_store.adopt_states()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group of parameters of the model, which the next step trains; every rank calls it.

        Args:
            param_group: As in ``torch.optim.Optimizer.add_param_group``.

        Raises:
            ValueError: A parameter is in another group already.
        """
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        taken = next((owner for param in params if (owner := find_unit(param)) is not None and owner[0].trainable), None)
        if taken is not None:
            raise ValueError(f"{taken[0].layout.slots[taken[1]].name}: some parameters appear in more than one parameter group")
        self.inner.add_param_group({**param_group, "params": params})
        self.given.append(params)

    @property
    def param_states(self) -> ParamStates:
        """Return the access to the states of single parameters."""
        return SegmentStates(self.segments, self.state_store.settle)

    def offloaded(self) -> Mapping[str, int]:
        """Return the bytes of this rank's offloaded masters and states by tier: ``host``, ``nvme``."""
        return self.state_store.tiers(lambda unit: [value for segment in self.segments.of(unit) for _, value in segment.elementwise()])

    def rank_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the vectors of ``memory``, which differ from rank to rank without being shards, for checkpoints: kind -> unit -> (n,)."""
        return self.memory.rank_states() if self.memory is not None else {}

    def load_rank_states(self, states: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restore the result of ``rank_states``; an optimizer without ``memory`` ignores it."""
        if self.memory is not None:
            self.memory.load_rank_states(states)

    __getattr__ = missing_attribute

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"ShardedOptimizer({len(self.segments)} segments of {len(self.units)} units, inner={self.inner!r})"


def _state_at_start(inner: torch.optim.Optimizer) -> Any:
    """Return the state of the tensors in the groups of ``inner``: the marks that they have, or what its constructor makes for them.

    Raises:
        ConfigError: The constructor marked parameters of the model, and the tensors are flat parts of several; or it made other states and
            cannot be called again.
    """
    held = {id(tensor) for group in inner.param_groups for tensor in group["params"]}
    if held.issuperset(map(id, states_by_param(inner))):
        return inner.state
    if marks := next(filter(is_mark, states_by_param(inner).values()), None):
        raise ConfigError(
            f"the {type(inner).__name__} given to initialize() has marks in its state ({marks}), but it updates flat parts of several "
            "parameters here; keep the marks in its param groups"
        )
    try:
        return build_anew(inner, [dict(group) for group in inner.param_groups]).state
    except Exception as error:  # another library's constructor may raise any error
        raise ConfigError(
            f"the constructor of the {type(inner).__name__} given to initialize() made states for parameters of the model. The engine "
            f"needs them for its own tensors, but could not make another object: {type(error).__name__}: {error}. Make states in step(), "
            "where a parameter has none"
        ) from error


def watch_parts(optimizer: ShardedOptimizer) -> None:
    """Look for writes of the script to the segments' tensors."""
    parts, store = optimizer.own.parts, optimizer.state_store
    parts.settle = store.settle
    store.shares_masters = partial(getattr, parts, "shares_masters")
    segments = optimizer.segments if type(optimizer) is ShardedOptimizer else Segments()
    parts.watch((segment.unit, segment.tensor, partial(getattr, segment, "low")) for segment in segments)


_STEP = ShardedOptimizer.step  # a script may replace it


def through_step(optimizer: ShardedOptimizer, take: Callable[[], T], held: Any, refuse: Callable[[str], object]) -> T:
    """Return ``take()``, which takes the engine's step at a boundary.

    If a script has replaced ``optimizer.step``, also on its class or on the inner optimizer, or has wrapped the object, call the script's
    ``step``, which calls the original.

    Args:
        optimizer: The engine's optimizer.
        take: Takes the step.
        held: ``engine.optimizer``: ``optimizer``, or the script's object in its place.
        refuse: Raises its argument on all ranks, in the vote of the step; collective.

    Raises:
        StateError: The script's ``step`` has not called the original once.
    """
    own = partial(optimizer.own.around, take, refuse)
    replaced = held is not optimizer or "step" in vars(optimizer) or type(optimizer).step is not _STEP
    if not replaced or optimizer.called:
        return own()
    return once("engine.optimizer.step", held.step, own, lambda taking: setattr(optimizer, "_take", taking), refuse)


def _clearing(optimizer: ref[ShardedOptimizer]) -> Callable[..., None]:
    """Return a ``zero_grad`` for the inner optimizer, which scripts may call; it clears ``optimizer`` and does not keep it alive."""

    def zero_grad(set_to_none: bool = True) -> None:
        outer = optimizer()
        if outer is not None:
            outer.zero_grad(set_to_none)

    return zero_grad


def _load_if_plain(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> bool:
    """Load ``state`` if a plain torch optimizer has written it, and return whether; raise if it is no state of this rank."""
    parts = state.get(_PARTS)
    if parts is not None and parts != optimizer.param_states.parts():
        raise StateError(
            "optimizer.load_state_dict got the state of other parts of the parameters than this rank trains: optimizer.state_dict() "
            "returns the part of one rank, and this one is from another rank, another number of ranks, or another configuration. Save "
            "with save_checkpoint (accelerator.save_state), and resume with load_checkpoint (accelerator.load_state) on any number of "
            "ranks; or save a file per rank"
        )
    if parts is not None or optimizer.load_plain is None or not state.keys() >= {"state", "param_groups"}:
        return False
    if reason := optimizer.load_plain(optimizer, state):
        raise StateError(
            f"optimizer.load_state_dict got the state of a plain torch optimizer that does not fit: {reason}. Nothing was loaded. Load "
            "it into an optimizer of the same kind with the same param groups"
        )
    return True


def _cut_anew(optimizer: ShardedOptimizer, starts: Collection[tuple[str, int, int]]) -> None:
    """Lay out segments that begin at ``starts``, see ``Segments.starts``, and have no states; local."""
    optimizer.state_store.settle()
    optimizer.inner.state.clear()
    optimizer._replace(lay_out(optimizer.inner, optimizer.units, optimizer.state_store.ranges))
    cuts: dict[int, list[int]] = {}
    for segment in optimizer.segments:
        own = (first for unit, group, first in starts if (unit, group) == (segment.unit.name, segment.group))
        inside = (first for first in own if segment.range.start < first < segment.range.stop)
        cuts[id(segment.tensor)] = [first - segment.range.start for first in inside]
    optimizer.cut(cuts)
