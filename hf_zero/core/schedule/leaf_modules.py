"""Modules that the user wants gathered as one, marked on a model before ``initialize``.

The mark is the attribute ``_z3_leaf``, which other libraries read too. A deep copy of a marked module and one loaded from a pickle
are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.observe import warn_once

_MARK = "_z3_leaf"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks every module of the given classes (or class names) as one block.

    Returns:
        The modules that were marked.

    Raises:
        ConfigError: None was found and ``raise_if_not_found``.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes ``set_z3_leaf_modules`` back.

    Returns:
        The modules of the given classes, none of which is marked any more.

    Raises:
        ConfigError: None was found and ``raise_if_not_found``.
    """
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of ``model``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether ``module`` is marked."""
    # Not getattr: the wrappers of other libraries pass unknown names on to the module inside.
    return bool(module.__dict__.get(_MARK, getattr(type(module), _MARK, False)))


def leaf_module_names(model: nn.Module) -> tuple[str, ...]:
    """Dotted names of the marked modules."""
    return tuple(name for name, module in model.named_modules() if name and z3_leaf_module(module))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks one module as one block, or unmarks it."""
    setattr(model, _MARK, bool(flag))


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks (or unmarks) the modules of these names (``model.named_modules``); returns them, and the names that are nobody's.

    Raises:
        ConfigError: A name is nobody's and ``raise_if_not_found``.
    """
    names = list(module_names)
    return _mark_names(model, names, lambda name, wanted: name == wanted, "name", flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """As ``set_z3_leaf_modules_by_name``, by the ends of names."""
    return _mark_names(model, list(module_name_suffixes), str.endswith, "name ending", flag, raise_if_not_found)


def mark_configured(model: nn.Module, classes: Iterable[str], names: Iterable[str], name_suffixes: Iterable[str]) -> None:
    """Marks what the configuration's ``leaf_module`` names; a warning names what is nobody's, but for classes, which have defaults."""
    set_z3_leaf_modules(model, classes, raise_if_not_found=False)
    _, unknown = set_z3_leaf_modules_by_name(model, names, raise_if_not_found=False)
    if unknown:
        warn_once(f"zero_optimization.leaf_module.names: no module of the model is named {unknown}")
    _, unknown = set_z3_leaf_modules_by_suffix(model, name_suffixes, raise_if_not_found=False)
    if unknown:
        warn_once(f"zero_optimization.leaf_module.name_suffixes: the name of no module of the model ends with {unknown}")


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, str):
        return any(kind in (base.__name__, f"{base.__module__}.{base.__qualname__}") for base in type(module).__mro__)
    return isinstance(module, kind)


def _mark_classes(model: nn.Module, classes: Iterable[type[nn.Module] | str], flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    wanted = list(classes)
    found = [module for module in model.modules() if any(_is_a(module, kind) for kind in wanted)]
    if not found and raise_if_not_found:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(f"no module of class {[getattr(kind, '__name__', kind) for kind in wanted]} in the model; it has {present}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _mark_names(
    model: nn.Module, wanted: list[str], fits: Callable[[str, str], bool], what: str, flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    found = [module for name, module in model.named_modules() if name and any(fits(name, text) for text in wanted)]
    missing = [text for text in wanted if not any(name and fits(name, text) for name, _ in model.named_modules())]
    if missing and raise_if_not_found:
        raise ConfigError(f"no module with {what} {missing} in the model")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing
