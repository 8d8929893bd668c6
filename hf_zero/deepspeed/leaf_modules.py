"""DeepSpeed's functions that mark modules to be gathered as one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hf_zero.core.units.grouping import is_leaf, mark, mark_classes, mark_names


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks every module of the given classes (or class names) as one block.

    Returns:
        The modules that were marked.

    Raises:
        ConfigError: None was found and ``raise_if_not_found``.
    """
    return mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes ``set_z3_leaf_modules`` back.

    Returns:
        The modules of the given classes, none of which is marked any more.

    Raises:
        ConfigError: None was found and ``raise_if_not_found``.
    """
    return mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of ``model``."""
    return [module for module in model.modules() if is_leaf(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    """Tell whether ``module`` is marked."""
    return is_leaf(module)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks one module as one block, or unmarks it."""
    mark(model, flag)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks (or unmarks) the modules of these names (``model.named_modules``); returns them, and the names that no module has.

    Raises:
        ConfigError: No module has a name and ``raise_if_not_found``.
    """
    return mark_names(model, module_names, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules as ``set_z3_leaf_modules_by_name`` does, by the ends of their names."""
    return mark_names(model, module_name_suffixes, flag, raise_if_not_found, suffixes=True)
