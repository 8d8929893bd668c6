"""Keep the settings that bitsandbytes has for single parameters, while an engine holds other tensors in the groups of its optimizer.

[Note: settings of single parameters] ``GlobalOptimManager`` has settings (32-bit states, a rate) by ``id(param)``, by position in the param
groups, and by module and name. transformers and PEFT give all embeddings 32-bit states there. The optimizer looks its own tensors up in
the manager, ``optimizer.mng``; in an engine these tensors are new, and each rank has some of them, in another order. So ``OwnSettings``
takes the manager's place in ``mng``. It answers with the settings that the manager has at that moment for the parameter of the model,
which a script may still change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from hf_zero.core.optimizer.held_params import nested_of

_BY_ID, _BY_PLACE, _BY_NAME = "pid2config", "index2config", "module_weight_config_triple"


def keep_settings(optimizer: torch.optim.Optimizer) -> Callable[[Mapping[int, Sequence[Tensor]]], None]:
    """Make ``optimizer``, and optimizers that it holds, find a parameter's settings for the tensor that replaces the parameter.

    Args:
        optimizer: The optimizer; its groups still hold the parameters of the model.

    Returns:
        A function that is given the tensors that take the place of parameters, by id of the parameter, as soon as they are made.
    """
    views = []
    for one in (optimizer, *nested_of(optimizer)):
        manager = getattr(one, "mng", None)
        manager = manager.manager if isinstance(manager, OwnSettings) else manager  # of an engine that was destroyed
        if all(hasattr(manager, name) for name in (_BY_ID, _BY_PLACE, _BY_NAME)):
            holder: Any = one
            holder.mng = OwnSettings(one, manager)
            views.append(holder.mng)

    def replaced(others: Mapping[int, Sequence[Tensor]]) -> None:
        for view in views:
            view.replaced(others)

    return replaced


class OwnSettings:
    """bitsandbytes' manager as one optimizer sees it, see [Note: settings of single parameters]; other attributes are the manager's.

    Attributes:
        manager: The manager of all optimizers of the process.
        pid2config: Settings by id of a tensor in the groups.
        index2config: Settings by group and position of a tensor in the groups.

    Args:
        optimizer: The optimizer; its groups hold the parameters of the model.
        manager: See the attribute.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, manager: Any) -> None:
        self.manager = manager
        self._optimizer = ref(optimizer)
        groups = enumerate(optimizer.param_groups)
        self._places = {id(param): (group, index) for group, own in groups for index, param in enumerate(own["params"])}
        self._stands_for: dict[int, int] = {}  # id of a tensor in the groups -> id of the parameter of the model
        self.pid2config = _Settings(self._by_id)
        self.index2config = _Settings(self._by_place)

    def replaced(self, others: Mapping[int, Sequence[Tensor]]) -> None:
        """Record tensors that were just created, by id of the parameter that each replaces."""
        for param, tensors in others.items():
            self._places.setdefault(param, (-1, param))  # added later: no position that another parameter could have
            for tensor in tensors:
                self._stands_for[id(tensor)] = param
                getattr(self.manager, _BY_ID).pop(id(tensor), None)  # an entry of a tensor that was freed and had the same id

    @property
    def module_weight_config_triple(self) -> list[Any]:
        """Return an empty list, after the settings by module and name were entered into the manager's tables: the optimizer, which reads
        the list in its first step, would look for the model's parameters in its groups.
        """
        for module, name, settings in getattr(self.manager, _BY_NAME):
            param = id(module._parameters.get(name))  # unlike module.weight it gathers nothing
            if param in self._places:
                getattr(self.manager, _BY_ID)[param] = settings
                getattr(self.manager, _BY_PLACE)[self._places[param]] = settings
        return []

    def _by_id(self, tensor: int) -> Mapping[str, Any]:
        if tensor not in self._stands_for:
            return {}
        table: dict[int, Mapping[str, Any]] = getattr(self.manager, _BY_ID)
        return {**table.get(self._stands_for[tensor], {}), **table.get(tensor, {})}

    def _by_place(self, place: tuple[int, int]) -> Mapping[str, Any]:
        optimizer = self._optimizer()
        params = optimizer.param_groups[place[0]]["params"][place[1] : place[1] + 1] if optimizer is not None else ()
        found = [self._places[self._stands_for[id(param)]] for param in params if id(param) in self._stands_for]
        table: dict[tuple[int, int], Mapping[str, Any]] = getattr(self.manager, _BY_PLACE)
        return table.get(found[0], {}) if found else {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "manager":
            raise AttributeError(name)
        return getattr(self.manager, name)


class _Settings(Mapping[Any, Mapping[str, Any]]):
    """Read-only table of settings that are not empty.

    Args:
        find: Returns the settings of a key, empty for none.
    """

    def __init__(self, find: Callable[[Any], Mapping[str, Any]]) -> None:
        self._find = find

    def __getitem__(self, key: Any) -> Mapping[str, Any]:
        if found := self._find(key):
            return found
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0
