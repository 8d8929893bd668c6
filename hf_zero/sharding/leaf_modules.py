"""Modules that the user wants gathered as one, marked on a model before ``initialize``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakSet

from torch import nn

from hf_zero.errors import ConfigError

_leaves: WeakSet[nn.Module] = WeakSet()


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks every module of the given classes (or class names) as one block.

    Returns:
        The modules that were marked.

    Raises:
        ConfigError: None was found and ``raise_if_not_found``.
    """
    wanted = list(leaf_module_classes)
    found = [module for module in model.modules() if any(_is_a(module, kind) for kind in wanted)]
    if not found and raise_if_not_found:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(f"no module of class {[getattr(kind, '__name__', kind) for kind in wanted]} in the model; it has {present}")
    for module in found:
        _leaves.add(module)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes ``set_z3_leaf_modules`` back; returns the modules that were unmarked."""
    wanted = list(leaf_module_classes)
    found = [module for module in get_z3_leaf_modules(model) if any(_is_a(module, kind) for kind in wanted)]
    if not found and raise_if_not_found:
        raise ConfigError(f"no module of class {[getattr(kind, '__name__', kind) for kind in wanted]} is marked as a leaf")
    for module in found:
        _leaves.discard(module)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of ``model``."""
    return [module for module in model.modules() if module in _leaves]


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether ``module`` is marked."""
    return module in _leaves


def leaf_module_names(model: nn.Module) -> tuple[str, ...]:
    """Dotted names of the marked modules."""
    return tuple(name for name, module in model.named_modules() if name and module in _leaves)


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, str):
        return any(kind in (base.__name__, f"{base.__module__}.{base.__qualname__}") for base in type(module).__mro__)
    return isinstance(module, kind)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks one module as one block, or unmarks it."""
    (_leaves.add if flag else _leaves.discard)(model)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks the modules of these names (``model.named_modules``); returns them, and the names that are nobody's.

    Raises:
        ConfigError: A name is nobody's and ``raise_if_not_found``.
    """
    names = list(module_names)
    return _mark(model, names, lambda name, wanted: name == wanted, "name", raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """As ``set_z3_leaf_modules_by_name``, by the ends of names."""
    return _mark(model, list(module_name_suffixes), str.endswith, "name ending", raise_if_not_found)


def _mark(
    model: nn.Module, wanted: list[str], fits: Callable[[str, str], bool], what: str, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    found = [module for name, module in model.named_modules() if name and any(fits(name, text) for text in wanted)]
    missing = [text for text in wanted if not any(name and fits(name, text) for name, _ in model.named_modules())]
    if missing and raise_if_not_found:
        raise ConfigError(f"no module with {what} {missing} in the model")
    for module in found:
        _leaves.add(module)
    return found, missing
