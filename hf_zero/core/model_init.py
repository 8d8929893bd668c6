"""Implement ``zero.Init``, which shards parameters while the model is being built, and unshards the ones that a constructor uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MethodType, TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.own_groups import own_topology
from hf_zero.comm.topology import build_topology
from hf_zero.core.schedule.gathered_parameters import GatheredParameters
from hf_zero.core.step.precision import KeptTypes
from hf_zero.core.units.grouping import NamedParam, build_unit
from hf_zero.core.units.guards import guard_state_dict, guard_unprepared
from hf_zero.core.units.layout import FROZEN, UnitState
from hf_zero.core.units.marks import ParamListener, is_packed, is_wrapped
from hf_zero.core.units.registration import register
from hf_zero.core.units.shard import ON_DEVICE, ShardStorage
from hf_zero.core.units.unit import Built, Unit, UnitSpec, find_unit, full_shape, is_sharded, shares_unsharded_memory
from hf_zero.memory import host_memory
from hf_zero.observe import warn_once
from hf_zero.system.sizes import size_text

# Fewer parameters than this appear in one line of a constructor. Of the parameters accessed, the oldest are resharded first.
_MOST_OPEN = 8

_SHAPE_ATTRIBUTES = frozenset({"shape", "ndim", "nbytes"})
_SHAPE_METHODS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "__len__"})
_DEVICE_ATTRIBUTES = frozenset({"device", "is_cpu", "is_cuda", "is_xpu", "is_mps", "get_device"})
_VALUE_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_VALUELESS_METHODS = frozenset(
    {"requires_grad_", "is_floating_point", "is_complex", "element_size", "register_hook", "register_post_accumulate_grad_hook", "__hash__"}
)
_LARGE = 64 * 2**20  # bytes


class ConstructorAccess(TorchFunctionMode):
    """A mode that unshards a sharded parameter when a torch function that needs its values receives it, and keeps the values that rank 0
    writes.

    [Note: writes in constructors] ``self.out = nn.Linear(...)`` shards the weight. A write in the next line,
    ``self.out.weight.data.zero_()``, would go to an empty tensor and be lost silently; torch's own Transformer ends its constructor with a
    loop of such writes. So while a model is built, a parameter that is accessed is unsharded, collectively, until the next module is
    assigned (or ``_MOST_OPEN`` others were accessed). Constructors must run the same code on all ranks, since otherwise the ranks' modules
    would differ anyway; if one rank alone prints a norm, it waits for the other ranks. Reads of shapes, dtypes and
    gradients do not unshard. The device is the one that the parameter was built on ([Note: as it was built]).

    Args:
        shows_values: False unshards nothing: functions receive meta tensors in place of sharded parameters, so that writes have no effect
            and random initialisation draws no numbers. This is for parameters that a checkpoint will fill.
    """

    def __init__(self, shows_values: bool = True) -> None:
        super().__init__()
        self._shows_values = shows_values
        self._open: dict[Unit, GatheredParameters] = {}  # in the order in which they were unsharded

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        owned = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, nn.Parameter) and find_unit(value)]
        sharded = [param for param in owned if is_sharded(param)]
        if not sharded:
            return func(*args, **kwargs)
        name, attribute = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            if attribute in _SHAPE_ATTRIBUTES:
                return func(_placeholder(sharded[0]), *args[1:])
            if attribute in _DEVICE_ATTRIBUTES:
                return func(_empty_as_built(sharded[0]), *args[1:])
            touches = attribute in _VALUE_ATTRIBUTES
        elif name in _SHAPE_METHODS and args and args[0] is sharded[0]:
            return func(_placeholder(sharded[0]), *args[1:], **kwargs)
        elif name in _DEVICE_ATTRIBUTES:
            return func(_empty_as_built(sharded[0]), *args[1:], **kwargs)
        else:
            touches = name not in _VALUELESS_METHODS
        if touches and not self._shows_values:
            args, kwargs = tree_map(lambda value: _placeholder(value) if any(value is one for one in sharded) else value, (args, kwargs))
            return func(*args, **kwargs)
        if touches:
            self._touch(owned)
        return func(*args, **kwargs)

    def _touch(self, params: Sequence[nn.Parameter]) -> None:
        """Unshard all of ``params``, and reshard the other parameters that have been unsharded longest if there are too many."""
        wanted = {find_unit(param)[0]: param for param in params}  # type: ignore[index]
        others = [unit for unit in self._open if unit not in wanted]
        for unit in others[: max(0, len(others) + len(wanted) - _MOST_OPEN)]:
            self._open.pop(unit).__exit__(None, None, None)
        for unit, param in wanted.items():
            if unit not in self._open and unit.state is not UnitState.UNSHARDED:
                self._open[unit] = GatheredParameters([param], modifier_rank=0)
                self._open[unit].__enter__()

    def close(self) -> None:
        """Reshard all parameters that were unsharded, with rank 0's values; collective."""
        while self._open:
            _, context = self._open.popitem()
            context.__exit__(None, None, None)

    def abandon(self, error: BaseException) -> None:
        """Reshard all parameters that were unsharded, and discard values that were written to them; local."""
        while self._open:
            _, context = self._open.popitem()
            context.__exit__(type(error), error, error.__traceback__)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _placeholder(param: nn.Parameter) -> torch.Tensor:
    return torch.empty(full_shape(param), dtype=param.dtype, device="meta")


def _empty_as_built(param: nn.Parameter) -> torch.Tensor:
    owner = find_unit(param)
    built = owner[0].built if owner is not None else None
    return torch.empty(0, dtype=param.dtype, device=built.device) if built is not None else param.detach()


class ModelInit:
    """A context that shards parameters as soon as their module is finished, so that no rank ever has the complete model.

    [Note: when a module is finished] The constructor of a module has returned when the module is assigned to its parent, which torch
    reports through its registration hooks. So each layer is unsharded only between its own construction and its assignment; the largest
    single layer determines the memory that is needed. Values are rank 0's. Hooks are registered on entry and removed on exit; nothing else
    in torch is changed, so every rank draws the random numbers of a model that is built unsharded, in the same order ([Note: as it was
    built] describes their dtypes).

    [Note: apply inside a constructor] ``self.apply(init_weights)`` at the end of a model's constructor reaches layers that are sharded
    already, and would write to empty tensors. So until exit the ``apply`` of a sharded layer unshards its parameters and keeps the values
    that rank 0 writes: once per layer, while other writes ([Note: writes in constructors]) are handled once per parameter. This ``apply``
    is an attribute of the layer; ``nn.Module.apply`` itself is not changed. Pretrained models have a variant of their own, ``smart_apply``,
    whose function also writes to the children of the module that it is given; not every version of their library unshards them for it.

    [Note: cast when built] Parameters are cast when the model is complete: its constructor draws values in the same dtype as without
    sharding, and only a complete model shows which of its parameters keep their dtype (``keeps``). Until then a shard has the dtype that
    the constructor gave it.

    Args:
        group: Data-parallel process group; None is all ranks.
        replicate: Number of shard groups that the process group is divided into.
        dtype: Dtype that floating-point parameters are cast to when the model is built; None keeps their dtypes.
        device: Device of the shards; None is the device of the local rank.
        enabled: False makes the context do nothing.
        shard_storage: Where shards are kept between uses.
        listener: Is notified of changes to the parameters.
        keeps: Returns the parameters of a model that the cast skips: dtypes by the parameters' ``id``.

    Attributes:
        fills_meta: Whether parameters (sharded) and buffers that are on the meta device at exit get memory, because a load will set the
            values of all of them. If False, they stay on the meta device.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        enabled: bool = True,
        shard_storage: ShardStorage = ON_DEVICE,
        listener: ParamListener | None = None,
        replicate: int = 1,
        keeps: Callable[[nn.Module], KeptTypes] = lambda _module: {},
    ) -> None:
        self._dtype = dtype
        self._keeps = keeps
        self._spec: UnitSpec | None = None
        if enabled:
            topology = own_topology(build_topology(group, device, replicate=replicate))
            listener = listener or ParamListener()
            self._spec = UnitSpec(open_collectives(topology), shards=True, reshards=True, shard_storage=shard_storage, listener=listener)
        self._open: dict[int, nn.Module] = {}  # modules with parameters of their own that are not sharded yet
        self._divided: WeakSet[nn.Module] = WeakSet()  # modules with sharded parameters, or whose ``smart_apply`` unshards
        self._built: WeakSet[nn.Module] = WeakSet()  # modules to which a parameter or a module was assigned
        self._building = False
        self.fills_meta = False
        self._access = ConstructorAccess()
        self._stack = ExitStack()

    def __enter__(self) -> ModelInit:
        if self._spec is not None:
            host_memory.return_large_blocks()
            self._building = True
            self._stack.enter_context(self._access)
            for handle in (
                register_module_parameter_registration_hook(self._on_parameter),
                register_module_module_registration_hook(self._on_module),
                register_module_buffer_registration_hook(self._on_buffer),
            ):
                self._stack.callback(handle.remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        if error is not None:
            self._access.abandon(error)
        self._access.close()
        self._building = False
        if kind is None:
            filled: dict[int, torch.Tensor] = {}
            for module in list(self._open.values()):
                if self.fills_meta:
                    _fill_meta(module, filled)
                self.shard(module)
        self._open.clear()
        kept = self._kept() if kind is None else {}
        for module in self._divided:
            for name in _STAND_INS:
                module.__dict__.pop(name, None)
            if kind is None:
                self._finish(module, kept)
        self._divided.clear()
        self._built.clear()

    def _kept(self) -> KeptTypes:
        """Return the parameters of the built models that keep their dtype, by ``id``."""
        inner = {id(child) for module in self._built for child in module.children()}
        kept: dict[int, torch.dtype] = {}
        for module in self._built if self._dtype is not None and self._spec is not None else ():
            if id(module) not in inner:
                kept.update(self._keeps(module))
        return kept

    def _finish(self, module: nn.Module, kept: KeptTypes) -> None:
        for param in module._parameters.values():
            owner = find_unit(param) if param is not None else None
            if owner is not None:
                _finish_built(owner[0], kept.get(id(param), self._dtype))

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        self._built.add(module)
        if param is not None and find_unit(param) is None:
            self._open[id(module)] = module
        elif param is not None:
            self._divided.add(module)  # recorded here, because the module may not be reported again

    def _on_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        if self.fills_meta and buffer is not None and buffer.is_meta:
            self._open[id(module)] = module

    def _on_module(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        self._access.close()
        self._built.add(parent)
        if module is not None:
            for inner in module.modules():
                if isinstance(inner, ParametrizationList) and inner is module:
                    _initialize_if_skipped(inner)
                # Constructors repeat a block with deep copies, whose parameters were never registered.
                if self._open.pop(id(inner), None) is not None or any(_is_whole(param) for param in inner._parameters.values()):
                    self.shard(inner)
                for buffer_name, buffer in inner._buffers.items():
                    self._on_buffer(inner, buffer_name, buffer)
                if any(name in inner.__dict__ for name in _STAND_INS):
                    self._divided.add(inner)
            if self._spec is not None:
                parent.__dict__["smart_apply"] = MethodType(_smart_apply_unsharded, parent)
                self._divided.add(parent)

    def shard(self, module: nn.Module, kept: KeptTypes | None = None) -> None:
        """Shard the parameters that ``module`` itself registers; collective. ``kept`` contains dtypes that some parameters keep, by ``id``.

        Originals of a parametrization (weight norm) stay unsharded until ``initialize``: reading ``module.weight`` computes it from them,
        and libraries that initialise weights do so on rank 0 alone.
        """
        if self._spec is None:
            return
        for param in module._parameters.values():
            if _is_empty(param):  # checked again when the module is assigned again, or at exit
                self._open[id(module)] = module
            elif param is not None and find_unit(param) is None and shares_unsharded_memory(param):
                param.data = param.data.clone()  # a view of an unsharded parameter, whose memory will be freed
        if isinstance(module, ParametrizationList):
            return
        for name, param in module._parameters.items():
            if param is None or _is_empty(param) or not param.is_floating_point() or find_unit(param) is not None:
                continue
            label = f"{type(module).__name__}.{name}"
            built = Built(param.dtype, param.device, shown=self._building)
            dtype = built.dtype if built.shown else (kept or {}).get(id(param), self._dtype or built.dtype)
            self.divide(module, label, [NamedParam(label, param, FROZEN)], dtype).built = built
            module.__dict__["apply"] = MethodType(_apply_unsharded, module)  # a method: a deep copy has its own
            self._divided.add(module)

    @property
    def saves_memory(self) -> bool:
        """Return whether sharding saves or moves memory of this rank: False on one rank without offload, and if ``enabled`` is False."""
        return self._spec is not None and (self._spec.collectives.world > 1 or self._spec.shard_storage.reshards)

    def divide(self, module: nn.Module, label: str, members: list[NamedParam], dtype: torch.dtype) -> Unit:
        """Make one unit of parameters of ``module``, with rank 0's values, and reshard it; collective.

        Args:
            module: Module that registers the parameters; gets the guards of modules that no engine unshards.
            label: Name of the unit.
            members: The parameters, with the attributes that the unit keeps for them.
            dtype: Dtype of the parameters from now on.

        Returns:
            The unit.
        """
        assert self._spec is not None
        unit = build_unit(label, members, dtype, self._spec)
        unit.reshard()
        guard_state_dict(module)
        guard_unprepared(module)
        return unit

    def shard_all(self, module: nn.Module) -> None:
        """Shard and cast every parameter of an existing module; collective."""
        kept = self._keeps(module) if self._dtype is not None else {}
        for inner in module.modules():
            self.shard(inner, kept)


def cast_sharded(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Cast a parameter that ``zero.Init`` put into a unit of its own; local. Packed weights do not change, nor do parameters that a caller
    has unsharded now, which ``initialize`` casts.
    """
    owner = find_unit(param)
    if owner is None or len(owner[0].params) > 1 or is_packed(param) or is_wrapped(param):
        return
    unit = owner[0]
    if unit.layout.dtype != dtype and not unit.trainable and unit.state is UnitState.SHARDED:
        _recast(unit, dtype).built = unit.built


def _finish_built(unit: Unit, dtype: torch.dtype | None) -> None:
    """Mark the model of a unit as built, and cast its shard by moving its parameters to a new, resharded unit; local.

    Args:
        unit: A sharded unit.
        dtype: The new dtype; None keeps the dtype it was built with.
    """
    built = unit.built
    if built is None or not built.shown or unit.state is not UnitState.SHARDED:
        return
    made = unit if dtype is None or dtype == unit.layout.dtype else _recast(unit, dtype)
    made.built = replace(built, shown=False)


def _recast(unit: Unit, dtype: torch.dtype) -> Unit:
    """Move the parameters of a sharded unit to a unit of another dtype, resharded, and return the new unit; local."""
    unit.shard_storage.flush()
    buffer = host_memory.empty(unit.layout.padded_numel, dtype, unit.collectives.topology.device)
    buffer[unit.owned.start : unit.owned.stop].copy_(unit.shard)
    spec = UnitSpec(unit.collectives, shards=True, reshards=True, shard_storage=unit.shard_storage, listener=unit.listener)
    made = Unit(replace(unit.layout, dtype=dtype), unit.params, spec, buffer)
    register(made)
    made.reshard()
    return made


def _fill_meta(module: nn.Module, filled: dict[int, torch.Tensor]) -> None:
    """Replace the module's own tensors on the meta device by zeros in host memory.

    Args:
        module: The module.
        filled: Replacements so far, by the id of the meta tensor, for tensors that several modules register.
    """
    for name, param in module._parameters.items():
        if param is not None and param.is_meta:
            if id(param) not in filled:
                made = nn.Parameter(torch.zeros_like(param, device="cpu"), param.requires_grad)
                vars(made).update(vars(param))
                filled[id(param)] = made
            module._parameters[name] = filled[id(param)]  # type: ignore[assignment]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = filled.setdefault(id(buffer), torch.zeros_like(buffer, device="cpu"))


def _is_empty(param: nn.Parameter | None) -> bool:
    """Return whether ``param`` has no values yet (``meta``), or not even a shape: a lazy module's before its first forward."""
    return param is not None and (param.is_meta or is_lazy(param))


def _is_whole(param: nn.Parameter | None) -> bool:
    return param is not None and find_unit(param) is None


def warn_if_built_whole(module: nn.Module) -> None:
    """Warn once, for a large model, that every rank has built the complete model, and say how to avoid this."""
    whole = sum(param.nbytes for param in module.parameters() if find_unit(param) is None and not is_fake(param))  # fake: has no memory
    if whole < _LARGE:
        return
    warn_once(
        f"stage 3 is on, but {type(module).__name__} ({size_text(whole, unit='GiB')}) was built before it, whole on every rank. "
        "To load only a shard on each rank, create the TrainingArguments with the configuration (or the Accelerator with "
        "zero3_init_flag: true) before from_pretrained, or build the model under "
        "hf_zero.zero.Init(config_dict_or_path=...)"
    )


def _apply_unsharded(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """Call ``module.apply(fn)`` with the parameters that ``module`` itself registers unsharded; collective."""
    with GatheredParameters(list(module._parameters.values()), modifier_rank=0):
        return type(module).apply(module, fn)


def _smart_apply_unsharded(module: Any, fn: Callable[..., None], *args: Any) -> Any:
    """Call ``module.smart_apply(fn)``, which pretrained models have, with the parameters that ``fn`` may write unsharded; collective."""
    return type(module).smart_apply(module, fn if isinstance(fn, _Unsharded) else _Unsharded(fn), *args)


class _Unsharded:
    """A function that calls ``fn(module, ...)`` with the parameters that ``module`` and its children register unsharded, and keeps the
    values that rank 0 writes.
    """

    def __init__(self, fn: Callable[..., None]) -> None:
        self._fn = fn

    def __call__(self, module: nn.Module, *args: Any) -> None:
        params = [param for part in (module, *module.children()) for param in part._parameters.values()]
        with GatheredParameters(params, modifier_rank=0):
            self._fn(module, *args)


_STAND_INS = ("apply", "smart_apply")

# The original function, because libraries that build a model to fill its weights from a file replace functions of torch.nn.init by
# empty ones.
_kaiming_uniform_ = nn.init.kaiming_uniform_


def _initialize_if_skipped(originals: ParametrizationList) -> None:
    """Give a parametrized weight torch's default values if the surrounding library has switched initialisation off.

    Without sharding, ``from_pretrained`` leaves such weights (wav2vec2's positional convolution) as their constructor made them; inside
    ``zero.Init`` it switches constructors' initialisation off and never initialises them later, so they would hold uninitialised memory.
    """
    if nn.init.kaiming_uniform_ is _kaiming_uniform_:
        return
    with torch.no_grad(), torch._C.DisableTorchFunction():  # under a torch function mode, the real function calls the empty one by its name
        weight = torch.empty_like(originals())
        originals.right_inverse(_kaiming_uniform_(weight, a=math.sqrt(5)) if weight.dim() > 1 else weight.uniform_(-0.1, 0.1))
