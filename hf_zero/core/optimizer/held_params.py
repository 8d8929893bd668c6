"""Find parameters that an optimizer keeps outside of its ``param_groups``, and put other tensors in their place.

[Note: parameters in attributes] A class may keep parameters in its attributes (``self.params``, a table by ``param`` or ``id(param)``), or
hold another optimizer with groups of its own. Flat parts of masters belong to several parameters, so they cannot stand there. The tensors
of full shape can (``whole_tensors.py``): containers are made anew with the tensors that this rank updates. The others have no entry, as
they are not in the groups.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.core.optimizer.step_values import is_foreign

_SEQUENCES = (list, tuple, set, frozenset, deque)
_TABLES = (dict, OrderedDict, defaultdict)


def nested_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that ``optimizer`` holds in its attributes, also inside lists, tuples and dicts, and those that they hold."""
    found: dict[int, torch.optim.Optimizer] = {}
    waiting: list[Any] = [optimizer]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.optim.Optimizer):
            if id(item) in found:
                continue
            found[id(item)] = item
            waiting += [value for name, value in list(vars(item).items()) if not is_foreign(name)]
        elif type(item) in (list, tuple):
            waiting += [value for value in item if isinstance(value, (torch.optim.Optimizer, list, tuple, dict))]
        elif type(item) is dict:
            waiting += [value for value in item.values() if isinstance(value, (torch.optim.Optimizer, list, tuple, dict))]
    return list(found.values())[1:]


def has_optimizers(value: Any) -> bool:
    """Return whether ``value`` is an optimizer, or a list, tuple or dict with one in it."""
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
    return any(isinstance(item, torch.optim.Optimizer) for item in items)


def describe_other_holders(optimizer: torch.optim.Optimizer) -> str:
    """Return a clause that says where parameters of the groups are kept besides; "" if they are in the groups alone."""
    groups = {id(group) for group in optimizer.param_groups}
    known = {id(param): () for group in optimizer.param_groups for param in group["params"]}
    for other in nested_of(optimizer):
        if any(group["params"] and id(group) not in groups for group in other.param_groups):
            return f"holds a {type(other).__name__} with param groups of its own"
    name = next(_holding(optimizer, known), None)
    return f"keeps parameters of the model in its attribute {name!r}" if name else ""


def _holding(optimizer: torch.optim.Optimizer, known: Mapping[int, Sequence[Tensor]]) -> Iterator[str]:
    """Yield the names of attributes in which ``optimizer`` or one that it holds has ``known`` parameters, by id."""
    for one in (optimizer, *nested_of(optimizer)):
        change = _Change(one, known)
        for name, value in vars(one).items():
            if not is_foreign(name) and change.of(value) is not value:
                yield name


def single_in(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an attribute that cannot be divided over ranks beside the parameters, "" for none: one that is a parameter
    itself, or a sequence with an entry for each parameter of another one.
    """
    known = {id(param): () for group in optimizer.param_groups for param in group["params"]}
    for one in (optimizer, *nested_of(optimizer)):
        own = {name: value for name, value in vars(one).items() if not is_foreign(name)}
        if name := next((name for name, value in own.items() if id(value) in known), ""):
            return name
        lists = {name: value for name, value in own.items() if type(value) in (list, tuple) and len(value) > 1}
        holding = {len(value) for value in lists.values() if any(id(item) in known for item in value)}
        for name, value in lists.items():
            if len(value) in holding and not any(id(item) in known or isinstance(item, dict) for item in value):
                return name
    return ""


def replace_parameters(optimizer: torch.optim.Optimizer, others: Mapping[int, Sequence[Tensor]]) -> None:
    """Put other tensors in the place of parameters in attributes of ``optimizer``, and in attributes and groups of optimizers in it.

    Args:
        optimizer: The optimizer; its own groups stay as they are.
        others: The tensors, by id of the parameter that they replace; none removes it.
    """
    groups = {id(group) for group in optimizer.param_groups}
    for one in (optimizer, *nested_of(optimizer)):
        change = _Change(one, others)
        for name, value in list(vars(one).items()):
            if not is_foreign(name) and (made := change.of(value)) is not value:
                setattr(one, name, made)
        for group in one.param_groups:
            if id(group) not in groups:
                group["params"] = [tensor for param in group["params"] for tensor in others.get(id(param), (param,))]


class _Change:
    """Makes containers anew that have parameters in them.

    Args:
        optimizer: The optimizer, whose groups and optimizers are left as they are.
        others: See ``replace_parameters``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, others: Mapping[int, Sequence[Tensor]]) -> None:
        self._others = others
        self._made: dict[int, Any] = {id(group): group for group in optimizer.param_groups}
        self._made[id(optimizer.param_groups)] = optimizer.param_groups
        self._kept: list[Any] = []  # so that no id is used again

    def of(self, value: Any) -> Any:
        """Return ``value`` with other tensors; ``value`` itself if no parameter is in it."""
        if isinstance(value, Tensor):
            found = self._others.get(id(value), (value,))
            return found[0] if found else None
        if type(value) not in (*_SEQUENCES, *_TABLES):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value  # a container may contain itself
            self._made[id(value)] = self._container(value)
            self._kept.append(value)
        return self._made[id(value)]

    def _container(self, value: Any) -> Any:
        if type(value) in _SEQUENCES:
            items = [made for item in value for made in self._each(item)]
            same = len(items) == len(value) and all(made is item for made, item in zip(items, value, strict=True))
            return value if same else type(value)(items)
        pairs = [(key, self.of(item)) for old, item in value.items() for key in self._each(old)]
        if len(pairs) == len(value) and all(k is old and made is item for (k, made), (old, item) in zip(pairs, value.items(), strict=True)):
            return value
        return defaultdict(value.default_factory, pairs) if isinstance(value, defaultdict) else type(value)(pairs)

    def _each(self, item: Any) -> Sequence[Any]:
        """Return the tensors in the place of a parameter, the ids of these in the place of its id, or ``item`` made anew."""
        if isinstance(item, Tensor):
            return self._others.get(id(item), (item,))
        if type(item) is int and item in self._others:
            return [id(tensor) for tensor in self._others[item]]
        return (self.of(item),)
