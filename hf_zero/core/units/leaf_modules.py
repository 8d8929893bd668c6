"""Mark modules, before ``initialize``, that the user wants unsharded as one block.

The mark is the attribute ``_z3_leaf``, which other libraries read too. A deep copy of a marked module and one loaded from a pickle
are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.observe import warn_once

_MARK = "_z3_leaf"


def is_leaf(module: nn.Module) -> bool:
    """Return whether ``module`` is marked."""
    # Not getattr: wrappers of other libraries forward unknown names to the module inside.
    return bool(module.__dict__.get(_MARK, getattr(type(module), _MARK, False)))


def leaf_module_names(model: nn.Module) -> tuple[str, ...]:
    """Return the dotted names of the marked modules."""
    return tuple(name for name, module in model.named_modules() if name and is_leaf(module))


def mark(module: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark."""
    setattr(module, _MARK, bool(flag))


def mark_classes(model: nn.Module, classes: Iterable[type[nn.Module] | str], flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    """Mark (or unmark) every module of the given classes (or class names), and return these modules.

    Raises:
        ConfigError: None was found and ``raise_if_not_found``.
    """
    wanted = list(classes)
    found = [module for module in model.modules() if any(_is_a(module, kind) for kind in wanted)]
    if not found and raise_if_not_found:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(f"no module of class {[getattr(kind, '__name__', kind) for kind in wanted]} in the model; it has {present}")
    for module in found:
        mark(module, flag)
    return found


def mark_names(
    model: nn.Module, names: Iterable[str], flag: bool, raise_if_not_found: bool, suffixes: bool = False
) -> tuple[list[nn.Module], list[str]]:
    """Mark (or unmark) the modules of these dotted names, or of all names that end with them; return the modules, and texts that match no
    name.

    Raises:
        ConfigError: A text matches no name and ``raise_if_not_found``.
    """
    wanted = list(names)
    fits: Callable[[str, str], bool] = str.endswith if suffixes else str.__eq__
    known = {name: module for name, module in model.named_modules() if name}
    found = [module for name, module in known.items() if any(fits(name, text) for text in wanted)]
    missing = [text for text in wanted if not any(fits(name, text) for name in known)]
    if missing and raise_if_not_found:
        raise ConfigError(f"no module with {'name ending' if suffixes else 'name'} {missing} in the model")
    for module in found:
        mark(module, flag)
    return found, missing


def mark_configured(model: nn.Module, classes: Iterable[str], names: Iterable[str], name_suffixes: Iterable[str]) -> None:
    """Mark the modules that the configuration's ``leaf_module`` names; warn of names without module, but not of classes, which have
    defaults.
    """
    mark_classes(model, classes, True, raise_if_not_found=False)
    _, unknown = mark_names(model, names, True, raise_if_not_found=False)
    if unknown:
        warn_once(f"zero_optimization.leaf_module.names: no module of the model is named {unknown}")
    _, unknown = mark_names(model, name_suffixes, True, raise_if_not_found=False, suffixes=True)
    if unknown:
        warn_once(f"zero_optimization.leaf_module.name_suffixes: the name of no module of the model ends with {unknown}")


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, str):
        return any(kind in (base.__name__, f"{base.__module__}.{base.__qualname__}") for base in type(module).__mro__)
    return isinstance(module, kind)
