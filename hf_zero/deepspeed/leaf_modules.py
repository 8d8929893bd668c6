"""Mark modules to be gathered as one block, with DeepSpeed's functions."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hf_zero.core.units.grouping import is_leaf, mark, mark_classes, mark_names


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module of the given classes (or class names) as one block.

    Returns:
        The modules that were marked.

    Raises:
        ConfigError: No module was found, and ``raise_if_not_found`` is true.
    """
    return mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo ``set_z3_leaf_modules``: remove the marks of all modules of the given classes (or class names).

    Returns:
        The modules that are not marked any more.

    Raises:
        ConfigError: No module was found, and ``raise_if_not_found`` is true.
    """
    return mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model`` that are marked as one block."""
    return [module for module in model.modules() if is_leaf(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    """Return whether ``module`` is marked as one block."""
    return is_leaf(module)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module as one block, or remove its mark if ``flag`` is false."""
    mark(model, flag)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names (``model.named_modules``), or remove their marks; return them, and the names without a module.

    Raises:
        ConfigError: A name has no module, and ``raise_if_not_found`` is true.
    """
    return mark_names(model, module_names, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules like ``set_z3_leaf_modules_by_name``, but by the ends of their names."""
    return mark_names(model, module_name_suffixes, flag, raise_if_not_found, suffixes=True)
