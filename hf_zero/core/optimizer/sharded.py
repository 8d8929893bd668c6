"""The optimizer users hold: steps the inner torch optimizer over this rank's segments of the masters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.core.optimizer.readable import ReadableOptimizer
from hf_zero.core.optimizer.state_store import StateStore
from hf_zero.core.units.layout import FROZEN, Range
from hf_zero.core.units.unit import Unit
from hf_zero.errors import ConfigError, StateError


@dataclass(frozen=True)
class OwnedSegment:
    """One param group's part of one unit's shard: what the inner optimizer sees as a parameter.

    Attributes:
        unit: The unit.
        group: Index of the param group.
        range: Elements, counted from the start of this rank's shard.
        tensor: View of the master, (range.numel,).
    """

    unit: Unit
    group: int
    range: Range
    tensor: torch.Tensor


def group_of_params(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[int, int]:
    """For each trainable parameter (by id) the index of its param group.

    Raises:
        ConfigError: The optimizer holds a tensor that is not a parameter of the model, or has been stepped before.
    """
    if not _is_fresh(optimizer):
        raise ConfigError(
            f"the {type(optimizer).__name__} given to initialize() already has state for {len(optimizer.state)} parameters; "
            "pass a new optimizer, and resume with load_checkpoint()"
        )
    groups: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ConfigError(
                    f"parameter {position} of param group {index} (shape {tuple(param.shape)}) of the optimizer is not a parameter of the "
                    "model; build the optimizer from the parameters of the model that is passed to initialize()"
                )
            groups[id(param)] = index if param.requires_grad else FROZEN
    return groups


def _is_fresh(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it was never stepped. Adagrad fills its state at construction, with step 0."""
    return all("step" in state and float(state["step"]) == 0 for state in optimizer.state.values())


class ShardedOptimizer(ReadableOptimizer):
    """A torch optimizer over flat master shards.

    The inner optimizer is the user's own object (or the one the config asked for): its ``param_groups`` stay live, so a
    learning rate changed by hand or by any scheduler takes effect at the next step. Only what the groups contain is exchanged:
    segments of this rank's masters in place of the model's parameters.

    Attributes:
        inner: The torch optimizer that does the arithmetic.
        units: Trainable units.
        segments: What ``inner`` updates, in order.
        overflow: Whether the last step was skipped for a gradient that is not finite.
        parameter_offload: Handle for libraries that look for DeepSpeed's hook object here.
        state_store: Where masters and moments live.
    """

    def __init__(self, inner: torch.optim.Optimizer, units: Sequence[Unit], state_store: StateStore | None = None) -> None:
        # Not super().__init__: groups and state are the inner optimizer's own, and must stay the same objects.
        self.inner = inner
        self.units = list(units)
        self.state_store = state_store or StateStore()
        self.overflow = False
        self.parameter_offload: Any = None
        self.scaler = None
        self.norm = None
        self.segments = self._lay_out()
        self._segments_of: dict[int, list[OwnedSegment]] = {}
        for segment in self.segments:
            self._segments_of.setdefault(id(segment.unit), []).append(segment)
        for index, group in enumerate(inner.param_groups):
            group["params"] = self._tensors(index)
        if inner.state:  # made at construction, for the parameters that the segments replace
            make: Any = type(inner)
            inner.state = make([dict(group) for group in inner.param_groups]).state
            self.state_store.adopt_states(self)
        self._step: Callable[[], None] | None = None
        self._clear: Callable[[], None] | None = None
        self._moves: dict[str, Callable[..., None]] = {}

    def _lay_out(self) -> list[OwnedSegment]:
        """The segments of this rank's shards."""
        return [
            OwnedSegment(unit, segment.group, part, _view(unit, part))
            for unit in self.units
            for segment in unit.layout.segments(unit.rank)
            for sub_group in self.state_store.ranges(unit)
            if (part := segment.range.shift(-unit.owned.start).intersect(sub_group)).numel
        ]

    def _tensors(self, group: int) -> list[torch.Tensor]:
        """What the inner optimizer's group ``group`` holds in place of the model's parameters."""
        return [segment.tensor for segment in self.segments if segment.group == group]

    def connect(self, step: Callable[[], None] | None, clear: Callable[[], None] | None, **moves: Callable[..., None]) -> None:
        """Tells it whose ``step`` and ``zero_grad``, ``offload_states`` and ``reload_states`` are meant when they are called on it."""
        self._step, self._clear, self._moves = step, clear, moves

    def dismiss(self) -> None:
        """Frees state and segments; the groups stay, empty."""
        self.connect(None, None)
        self.state_store.close()
        self.inner.state.clear()
        self.segments, self.units = [], []
        self._segments_of.clear()
        for group in self.inner.param_groups:
            group["params"] = []

    def update(self, shards: Sequence[torch.Tensor], factor: torch.Tensor, updated: Callable[[Unit], None]) -> None:
        """One update of masters and shards with this rank's gradients, (shard_numel,) per unit, times ``factor`` (0-dim).

        ``updated`` is called with each unit, in order, when its shard has its new value; all else is local.
        """
        self.state_store.update(self, shards, factor, updated)
        # What torch's schedulers look at before they warn that they were stepped before the optimizer.
        self._opt_called = True

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Finishes the reduction, clips and updates, as the engine's ``step`` does; for callers that step the optimizer.

        Raises:
            StateError: Nobody connected an engine.
        """
        loss = closure() if closure is not None else None
        if self._step is None:
            raise StateError("this optimizer belongs to no engine any more (destroy() was called)")
        self._step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops ``param.grad`` of the model; gradients accumulated for the coming step are kept, as in DeepSpeed."""
        if self._clear is not None:
            self._clear()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups, live."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, by segment; waits for an update that is under way."""
        self.state_store.settle()
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """As the engine's method of that name."""
        self._moves["offload_states"](*args, **kwargs)

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """As the engine's method of that name."""
        self._moves["reload_states"](*args, **kwargs)

    def refresh_fp32_params(self) -> None:
        """Takes the masters from the 16-bit weights, after a script wrote to the module (``load_state_dict``) at stages 0 to 2; local."""
        for unit in self.units:
            unit.own.refresh_master()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This rank's part of the state; checkpoints are written by ``save_checkpoint``, which any number of ranks can read."""
        self.state_store.settle()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Takes back what ``state_dict`` of the same rank and world size gave."""
        self.state_store.settle()
        tensors = [group["params"] for group in self.inner.param_groups]
        self.inner.load_state_dict(state_dict)
        for group, params in zip(self.inner.param_groups, tensors, strict=True):
            group["params"] = params
        self.state_store.adopt_states(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: units are laid out once.

        Raises:
            StateError: Always.
        """
        raise StateError("a param group cannot be added after initialize(); pass all groups to initialize() and freeze with requires_grad")

    def rank_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Vectors that differ from rank to rank without being shards, for checkpoints: kind -> unit -> (n,). None here."""
        return {}

    def load_rank_states(self, states: dict[str, dict[str, torch.Tensor]]) -> None:
        """Takes what ``rank_states`` gave; an optimizer that has none ignores those of another."""

    def segments_of(self, unit: Unit) -> list[OwnedSegment]:
        """The segments inside ``unit``."""
        return self._segments_of.get(id(unit), [])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"ShardedOptimizer({len(self.segments)} segments of {len(self.units)} units, inner={self.inner!r})"


def _view(unit: Unit, part: Range) -> torch.Tensor:
    if unit.master is None:
        raise StateError(f"unit {unit.name} has no master to optimize")
    # A Parameter without requires_grad: some optimizers look at the type; the view shares the master's memory.
    return nn.Parameter(unit.master[part.start : part.stop], requires_grad=False)
