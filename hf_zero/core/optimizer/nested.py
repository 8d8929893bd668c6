"""Serve optimizers that hold another optimizer and step it (Lookahead, SAM, several in one), or are made in other unusual ways.

[Note: nested optimizers] The inner optimizer's groups are given other tensors than the model's parameters, and all code of states looks
into its ``state``. So an optimizer that it holds gets the same ``state``. Each of both keeps its entries of a parameter under names of its
own, and all of them are offloaded and saved. Groups of its own: see [Note: parameters in attributes].
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hf_zero.core.optimizer.clones import (
    TRIAL_STEPS,
    CollectiveError,
    clone,
    give,
    options_of,
    random_kept,
    trial_data,
    trial_step,
    unchanged,
)
from hf_zero.core.optimizer.held_params import nested_of
from hf_zero.core.optimizer.script_states import NamedStates
from hf_zero.core.optimizer.step_values import is_foreign
from hf_zero.errors import ConfigError

_HOOKS = tuple(f"_optimizer_{method}_{when}_hooks" for method in ("step", "state_dict", "load_state_dict") for when in ("pre", "post"))


def require_state(optimizer: Optimizer) -> None:
    """Raise if ``optimizer`` keeps a tensor for each parameter outside of its ``state``: the engine can neither divide nor save these.

    It would combine them with tensors of other parameters, which may have the same shape.

    Raises:
        ConfigError: An attribute has tensors of the shapes of all parameters, or of those of a param group, in their order.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    known = {id(param) for group in groups for param in group}
    wanted = [[param.shape for param in params] for params in (*groups, [param for group in groups for param in group])]
    for one in (optimizer, *nested_of(optimizer)):
        for name, value in vars(one).items():
            if is_foreign(name):
                continue
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            shapes = [tensor.shape for tensor in tensors if id(tensor) not in known]
            if len(shapes) > 1 and shapes in wanted:
                raise ConfigError(
                    f"the {type(one).__name__} given to initialize() keeps a tensor for each parameter in its attribute {name!r}. The "
                    "engine updates parts of parameters that lie on this rank, in another order: make these tensors in step(), in "
                    "self.state[param] of the tensors in self.param_groups, where they are divided and saved too"
                )


def complete(optimizer: Optimizer) -> None:
    """Add the attributes that ``Optimizer.__init__`` makes to an optimizer whose constructor does not call it, as Lookahead's do."""
    for name in _HOOKS:
        if not hasattr(optimizer, name):
            setattr(optimizer, name, OrderedDict())


def join_states(optimizer: Optimizer) -> None:
    """Give all optimizers that ``optimizer`` holds its ``state``, see [Note: nested optimizers].

    Raises:
        ConfigError: Two of them keep different entries of a parameter under one name.
    """
    apart = [other for other in nested_of(optimizer) if other.state is not optimizer.state]
    if apart and not optimizer.state and (name := _shared_name(optimizer)):
        raise ConfigError(
            f"the {type(optimizer).__name__} given to initialize() and the {type(apart[0]).__name__} that it holds both keep a state "
            f"{name!r} of each parameter: rename it in one of them, because the engine keeps and saves the states of both together"
        )
    for other in apart:
        optimizer.state.update(other.state)
        give(other, "state", optimizer.state)


def load_together(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Call ``optimizer.load_state_dict``, after which it and the optimizers that it holds have one ``state`` and the same groups again.

    The method makes a new ``state`` and new groups for ``optimizer``, for one that it holds, or for both.
    """
    former, groups = optimizer.state, list(optimizer.param_groups)
    places = [(other, [_place(group, groups) for group in other.param_groups]) for other in nested_of(optimizer)]
    optimizer.load_state_dict(state_dict)
    for other, positions in places:
        if other.state is not former and other.state is not optimizer.state:
            optimizer.state.update(other.state)
        give(other, "state", optimizer.state)
        for index, (group, place) in enumerate(zip(list(other.param_groups), positions, strict=True)):
            if place is None or group is (present := optimizer.param_groups[place]):
                continue
            if present is groups[place]:  # only the other one was loaded
                present.update(options_of(group))
            other.param_groups[index] = present


def _place(group: dict[str, Any], groups: Sequence[dict[str, Any]]) -> int | None:
    return next((index for index, own in enumerate(groups) if own is group), None)


def name_states(optimizer: Optimizer) -> None:
    """Make reads of ``optimizer.state`` find no states of the model's parameters."""
    state: Any = optimizer.state
    if type(state) is defaultdict:
        set_state(optimizer, NamedStates(state.default_factory, state))


def set_state(optimizer: Optimizer, state: Any) -> None:
    """Set the ``state`` of ``optimizer``, and of optimizers in it that share it."""
    sharing = [other for other in nested_of(optimizer) if other.state is optimizer.state]
    for other in (optimizer, *sharing):
        give(other, "state", state)


def _shared_name(optimizer: Optimizer) -> str:
    """Return a name under which two of the optimizers keep an entry of a parameter, found by steps over a small vector; "" for none."""
    with random_kept(optimizer):
        for group in optimizer.param_groups:
            start, grads = trial_data(optimizer)
            vector = torch.nn.Parameter(start.float().flatten())
            try:
                trial = clone(optimizer, [{**options_of(group), "params": [vector]}], defaultdict(dict), [group])
                for other in nested_of(trial):
                    other.state = defaultdict(dict)
                with unchanged(optimizer):
                    for grad in grads[:TRIAL_STEPS]:
                        vector.grad = grad.float().flatten()
                        trial_step(trial)
            except (Exception, CollectiveError):  # another library's step may raise any error
                continue
            names = [name for one in (trial, *nested_of(trial)) for name in _entries(one.state, vector)]
            twice = next((name for name in names if names.count(name) > 1), "")
            if twice:
                return twice
    return ""


def _entries(state: Mapping[Any, Any], vector: torch.Tensor) -> Iterator[str]:
    yield from state.get(vector, ())
