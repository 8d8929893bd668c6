"""Find the blocks of a model, and the modules that a script has marked as leaves, which stay in one block; make units from parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_zero.core.units.layout import build_layout
from hf_zero.core.units.marks import is_packed
from hf_zero.core.units.registration import register
from hf_zero.core.units.shard import ON_DEVICE
from hf_zero.core.units.unit import Unit, UnitSpec, find_unit, full_shape
from hf_zero.core.units.whole_buffer import view_of
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.memory import host_memory
from hf_zero.observe import warn_once

# Embeddings and heads outside the repeated blocks become a block of their own from this size on; smaller ones stay with the root.
LARGE_MODULE_NUMEL = 1 << 20


@dataclass(frozen=True)
class NamedParam:
    """A parameter that will be part of a unit: its dotted name, the parameter, and its optimizer param group (or ``FROZEN``). Scales of a
    packed weight are a plain tensor.
    """

    name: str
    param: nn.Parameter
    group: int


def build_unit(name: str, members: Sequence[NamedParam], dtype: torch.dtype, spec: UnitSpec) -> Unit:
    """Make an unsharded unit of ``members``; collective.

    Values are copied from the parameters themselves, or from the unit that they belong to now (``zero.Init``, another engine), which they
    leave. At most this one unit is unsharded, in the wider of the old and the new dtype.

    Args:
        name: Name of the unit.
        members: The parameters; all trainable or all frozen.
        dtype: The new dtype of the parameters.
        spec: Settings for the units of this engine.

    Raises:
        StateError: A parameter has no data (meta device).
    """
    collectives = spec.collectives
    layout, order = build_layout(
        name,
        [(member.name, full_shape(member.param)) for member in members],
        [member.group for member in members],
        dtype,
        collectives.world if spec.shards else 1,
        collectives.data.world if spec.shards else 1,
        [member.param.dtype if is_packed(member.param) else dtype for member in members],
    )
    params = [members[index].param for index in order]
    wide = _widest([dtype, *(param.dtype for param in params if not is_packed(param))])
    values = host_memory.empty(layout.padded_numel, wide, collectives.topology.device).zero_()
    for slot, param in zip(layout.slots, params, strict=True):
        _copy_value(view_of(values, slot), param, slot.name)
    if spec.sync_values and any(find_unit(param) is None for param in params):
        collectives.data.broadcast(values, 0, name)
    buffer = values if wide == dtype else host_memory.cast(values, dtype)
    unit = Unit(layout, params, spec, buffer)
    if unit.trainable:
        master_dtype = spec.master_dtype or dtype
        # The master is made from values in the dtype of the parameters, so that a model that zero.Init has cast at construction gets the
        # same masters.
        own_master = master_dtype == dtype and spec.shard_storage is ON_DEVICE
        # A master is created on the device even if the shard is kept elsewhere: only an offloaded optimizer moves it.
        unit.own.master = unit.shard if own_master else host_memory.cast(unit.full[unit.owned.start : unit.owned.stop], master_dtype)
    register(unit)
    return unit


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    result: torch.dtype | None = None
    for dtype in dtypes:
        result = dtype if result is None else torch.promote_types(result, dtype)
    if result is None:
        raise StateError("a unit needs at least one parameter")
    return result


def _copy_value(target: torch.Tensor, param: nn.Parameter, name: str) -> None:
    if param.is_meta:
        raise StateError(
            f"parameter {name} is on the meta device: it has no values to train. Load or initialise the model first "
            "(from_pretrained, or model.to_empty() and an initialisation)"
        )
    owner = find_unit(param)
    if owner is None:
        target.copy_(param.detach())
        return
    with owner[0].unsharded():
        target.copy_(param.detach())


@dataclass
class BlockSpec:
    """Parameters that are unsharded together, before ``module`` runs.

    Attributes:
        name: Dotted name of the module; ``root`` for the parameters outside all blocks, or ``root.`` if a module has this name.
        module: The module whose forward needs the parameters.
        members: Parameters of the block; each parameter is in exactly one block.
        read_in_backward: False when backward never reads the parameters' values (embeddings).
    """

    name: str
    module: nn.Module
    members: list[NamedParam] = field(default_factory=list)
    read_in_backward: bool = True


def enclosing(name: str, among: Container[str]) -> str | None:
    """Return the outermost module name of ``among`` that is ``name`` or contains it; costs one lookup for each part of the name."""
    return next((path for path in _paths(name) if path in among), None)


def _paths(name: str) -> Iterator[str]:
    """Yield the dotted names of the modules that contain module ``name``, outermost first, and its own."""
    return itertools.accumulate(name.split("."), "{}.{}".format)


def modules_kept_unsharded(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules, by dotted name, that a library calls on one rank only, so that they must stay unsharded whatever their size.

    PEFT calls a prompt encoder only on the rank that saves the adapter (``get_prompt_embedding_to_save``).
    """
    found = {}
    for name, module in model.named_modules():
        if hasattr(type(module), "get_prompt_embedding_to_save") and (encoder := module._modules.get("prompt_encoder")) is not None:
            found[f"{name}.prompt_encoder".lstrip(".")] = encoder
    return found


def find_blocks(model: nn.Module, leaves: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return the repeated blocks of ``model`` by dotted name, in the model's order, none inside another.

    They are the modules whose classes the model's ``_no_split_modules`` names, if there are any; otherwise the children of the largest
    ``ModuleList`` or ``Sequential`` containers, found by structure. A leaf module (``leaves``: dotted names) becomes a block unless a block
    contains it; it replaces blocks inside it.
    """
    wanted = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    found = _outermost(model, lambda name, module: type(module).__name__ in wanted) if wanted else {}
    if not found:
        found = _blocks_by_structure(model)
    extra = _outermost(model, lambda name, module: name not in found and name in leaves)
    for name, module in extra.items():
        if enclosing(name, found) is None:
            found = {block: inner for block, inner in found.items() if not block.startswith(f"{name}.")}
            found[name] = module
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def _outermost(model: nn.Module, is_block: Callable[[str, nn.Module], bool]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name and enclosing(name, found) is None and is_block(name, module) and _has_params(module):
            found[name] = module
    return found


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _blocks_by_structure(model: nn.Module) -> dict[str, nn.Module]:
    """Return the children of outermost containers that have at least two modules with parameters and a tenth of the model's elements.

    A module that is registered under several names has the first one, as in ``named_modules``.
    """
    total = _total_numel(model)
    first = {id(module): name for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}
    above: set[str] = set()  # names of modules that contain a block
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or enclosing(name, found) is not None:
            continue
        children = [child for child in module.children() if _has_params(child)]
        if len(children) < 2 or 10 * _total_numel(module) < total:
            continue
        for child in children:
            where = first[id(child)]
            if enclosing(where, found) is None:
                if where in above:
                    found = {block: inner for block, inner in found.items() if not block.startswith(f"{where}.")}
                found[where] = child
                above.update(_paths(where.rpartition(".")[0]))
    return found


def _total_numel(module: nn.Module) -> int:
    return sum(full_shape(param).numel() for param in module.parameters())


def build_blocks(
    model: nn.Module, members: Sequence[NamedParam], leaves: Collection[str] = (), large: int = LARGE_MODULE_NUMEL
) -> list[BlockSpec]:
    """Divide ``members`` (each parameter once) among the root, the blocks, and large embeddings and heads.

    A parameter that several modules register belongs to their lowest common ancestor, and through it to the nearest
    enclosing block or the root.

    Returns:
        The root first (even when empty), then the other blocks in the model's order; blocks without parameters are left out.

    Raises:
        UnsupportedError: A module replaces its parameters when the model lists its modules.
    """
    blocks = find_blocks(model, leaves)
    holders = lowest_modules(model)
    _refuse_replaced(members, holders)
    root = BlockSpec("root." if "root" in model._modules else "root", model)  # no module's name ends with a dot
    specs = {name: BlockSpec(name, module) for name, module in blocks.items()}
    sizes: dict[str, int] = {}
    for member in members:
        holder = holders[id(member.param)]
        sizes[holder] = sizes.get(holder, 0) + full_shape(member.param).numel()
    for member in members:
        holder = holders[id(member.param)]
        block = enclosing(holder, specs)
        if block is None and holder and sizes[holder] >= large:
            module = model.get_submodule(holder)
            if not any(module.children()):  # an embedding or a head, not a container of modules
                specs[holder] = BlockSpec(holder, module, read_in_backward=type(module).forward is not nn.Embedding.forward)
                block = holder
        (specs[block] if block is not None else root).members.append(member)
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    used = sorted((spec for spec in specs.values() if spec.members), key=lambda spec: order[spec.name])
    return [root, *used]


def _refuse_replaced(members: Sequence[NamedParam], holders: Container[int]) -> None:
    replaced = [member.name for member in members if id(member.param) not in holders]
    if replaced:
        module = replaced[0].rpartition(".")[0]
        raise UnsupportedError(
            f"module {module} replaces its parameters by new ones each time the model runs or lists its modules ({len(replaced)} "
            f"parameters: {', '.join(replaced[:4])}), so they cannot be divided over the ranks (ZeRO stage 3). LoRA over "
            "torch.nn.MultiheadAttention does so: leave it out of target_modules, or use stage 0, 1 or 2"
        )


def lowest_modules(model: nn.Module) -> dict[int, str]:
    """Return for each parameter (by id) the dotted name of the lowest module that contains all its registrations."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(id(param), []).append(name)
    holders = {}
    for key, names in owners.items():
        paths = [name.split(".") if name else [] for name in names]
        common: list[str] = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        holders[key] = ".".join(common)
    return holders


_MARK = "_z3_leaf"


def is_leaf(module: nn.Module) -> bool:
    """Return whether ``module`` is marked as a leaf."""
    # Not getattr: wrappers of other libraries forward unknown names to the module inside.
    return bool(module.__dict__.get(_MARK, getattr(type(module), _MARK, False)))


def leaf_module_names(model: nn.Module) -> tuple[str, ...]:
    """Return the dotted names of the modules that are marked as leaves."""
    return tuple(name for name, module in model.named_modules() if name and is_leaf(module))


def mark(module: nn.Module, flag: bool) -> None:
    """Mark ``module`` as a leaf, or remove its mark."""
    setattr(module, _MARK, bool(flag))


def mark_classes(model: nn.Module, classes: Iterable[type[nn.Module] | str], flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    """Mark (or unmark) every module of the given classes or class names as a leaf, and return these modules.

    Raises:
        ConfigError: No module has one of these classes, and ``raise_if_not_found``.
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
    """Mark (or unmark) modules as leaves: those with these dotted names, or, with ``suffixes``, those whose names end with them.

    Returns:
        The modules, and the texts that match no name.

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
    """Mark the modules that the configuration's ``leaf_module`` section names as leaves. Warn about names without a module, but not about
    classes, which have default values.
    """
    mark_classes(model, classes, True, raise_if_not_found=False)
    _, unknown = mark_names(model, names, True, raise_if_not_found=False)
    if unknown:
        warn_once(f"zero_optimization.leaf_module.names: no module of the model is named {unknown}")
    _, unknown = mark_names(model, name_suffixes, True, raise_if_not_found=False, suffixes=True)
    if unknown:
        warn_once(f"zero_optimization.leaf_module.name_suffixes: no module name of the model ends with {unknown}")


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, str):
        return any(kind in (base.__name__, f"{base.__module__}.{base.__qualname__}") for base in type(module).__mro__)
    return isinstance(module, kind)
