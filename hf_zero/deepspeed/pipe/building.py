"""Describe and build the layers of a pipeline: layers of this rank's stage with values, layers of other stages as shapes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hf_zero.core.units.marks import TpShard, mark_tp_shard
from hf_zero.deepspeed.served.helpers import call_to_str
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.observe import logger


class LayerSpec:
    """The description of a layer that a pipeline builds only on the ranks of its stage.

    Args:
        typename: Class of the layer.
        module_args: Positional arguments of its constructor.
        module_kwargs: Keyword arguments of its constructor.

    Raises:
        ConfigError: ``typename`` is not a class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(f"{type(self).__name__}({typename!r}): pass a class of torch.nn.Module, which the pipeline constructs")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Build and return a new layer.

        Args:
            log: Whether to log the construction.
        """
        if log:
            logger.info("building %r", self)
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return call_to_str(self.typename.__name__, *self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """The description of a layer that occurs at several positions with the same parameters.

    The first description with a key defines the layer; the others run the same layer again. All parameters are shared, over any number of
    stages.

    Args:
        key: Key of the layer; descriptions with the same key share parameters.
        typename: Class of the layer.
        module_args: Positional arguments of its constructor.
        forward_fn: ``forward_fn(layer, inputs)``, called instead of ``layer(inputs)``, for example to use an embedding as the head.
        tied_weight_attr: Name of the shared parameter, or several names; each must exist.
        module_kwargs: Keyword arguments of the constructor.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


Layer = nn.Module | LayerSpec | Callable[[Any], Any]


def require_layers(layers: Any) -> list[Layer]:
    """Return ``layers`` as a list.

    Raises:
        ConfigError: There are no layers, or an entry is not a layer; a tied layer lacks the parameter that it names, or has another class
            than the other layers with its key.
    """
    found = list(layers)
    if not found:
        raise ConfigError("PipelineModule(layers=[]): at least one layer is needed")
    classes: dict[str, type[nn.Module]] = {}
    for place, layer in enumerate(found):
        if not (isinstance(layer, (nn.Module, LayerSpec)) or callable(layer)) or isinstance(layer, type):
            raise ConfigError(
                f"PipelineModule: layer {place} is {layer!r}; a torch.nn.Module, a LayerSpec, a TiedLayerSpec or a function is allowed"
            )
        if isinstance(layer, TiedLayerSpec) and classes.setdefault(layer.key, layer.typename) is not layer.typename:
            raise ConfigError(
                f"PipelineModule: TiedLayerSpec {layer.key!r} of layer {place} has the class {layer.typename.__name__}, but an "
                f"earlier layer with this key has the class {classes[layer.key].__name__}. Layers with one key are one layer, so "
                "give the same class (forward_fn may differ)"
            )
    return found


def name_of(layer: Layer) -> str:
    """Return the class name of a layer, or the name of a function; ``partition_method`` ``type:REGEX`` matches this name."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def without_values(layer: Layer) -> nn.Module | None:
    """Return the module of ``layer`` on the meta device; None for a function. Random generators do not change.

    Raises:
        ConfigError: A tied layer lacks the parameter that it names.
    """
    if isinstance(layer, nn.Module):
        return layer
    if not isinstance(layer, LayerSpec):
        return None
    try:
        with kept_random_states(), torch.device("meta"):
            module = layer.build()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # the constructor reads values; other errors recur in the real build
        with kept_random_states():
            module = layer.build()
    if isinstance(layer, TiedLayerSpec):
        _require_tied(layer, module)
    return module.to("meta")


def require_dimensions(layers: Sequence[Layer], shapes: Sequence[nn.Module | None]) -> None:
    """Refuse scalar parameters, which cannot be empty on other stages.

    Raises:
        UnsupportedError: A parameter has no dimension.
    """
    for place, (layer, shape) in enumerate(zip(layers, shapes, strict=True)):
        for name, param in shape.named_parameters() if shape is not None else ():
            if param.dim() == 0:
                raise UnsupportedError(
                    f"PipelineModule: parameter {name} of layer {place} ({name_of(layer)}) is a single number without a dimension, so "
                    "other stages cannot leave it empty: give it the shape (1,)"
                )


def _require_tied(spec: TiedLayerSpec, module: nn.Module) -> None:
    for name in spec.tied_weight_attr:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, torch.Tensor):
            names = ", ".join(name for name, _ in module.named_parameters()) or "none"
            raise ConfigError(f"TiedLayerSpec {spec.key!r}: tied_weight_attr {name!r} is not a parameter of {spec!r}, which has {names}")


def build_layers(
    layers: Sequence[Layer], shapes: Sequence[nn.Module | None], wanted: Sequence[bool], seed: Callable[[int], Any] | None
) -> list[nn.Module | None]:
    """Build the layers: with values if this rank runs them, otherwise as ``HeldElsewhere``; None for functions. Layers with one key share
    one module.

    [Note: layers of other stages] The values are equal to those of a build of all layers, whatever the number of stages. Without seeds this
    requires to build the layers of other stages too, one at a time, and to drop them. If each layer has a seed, only this rank's layers are
    built, and the random generators are restored.

    Args:
        layers: The layers.
        shapes: Result of ``without_values`` for each layer.
        wanted: Whether this rank runs the layer, for each layer.
        seed: Function that is called with a layer's number before the layer is built; None seeds nothing.
    """
    with kept_random_states() if seed is not None else nullcontext():
        return list(_built(layers, shapes, wanted, seed))


def _built(
    layers: Sequence[Layer], shapes: Sequence[nn.Module | None], wanted: Sequence[bool], seed: Callable[[int], Any] | None
) -> Iterator[nn.Module | None]:
    run = {layer.key for layer, here in zip(layers, wanted, strict=True) if here and isinstance(layer, TiedLayerSpec)}
    elsewhere = HeldElsewhere(layer for layer, here in zip(layers, wanted, strict=True) if here and isinstance(layer, nn.Module))
    tied: dict[str, nn.Module | None] = {}
    for place, (layer, shape) in enumerate(zip(layers, shapes, strict=True)):
        key = layer.key if isinstance(layer, TiedLayerSpec) else None
        if seed is not None:
            seed(place)
        if not isinstance(layer, LayerSpec):
            yield shape if shape is None or wanted[place] else elsewhere(shape)
        elif key in tied:
            yield tied[key]
        else:
            here = wanted[place] or key in run
            module = layer.build() if here or seed is None else None
            built = module if here or shape is None else elsewhere(shape)
            if key is not None:
                tied[key] = built
            yield built


class HeldElsewhere:
    """A converter of other stages' modules to copies with empty, marked parameters and zero buffers; it does not change the originals.

    Args:
        here: Modules that this rank runs; tensors that they share with modules of other stages stay shared.
    """

    def __init__(self, here: Iterable[nn.Module]) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # id of original -> (copy, original); holding the original keeps its id unique
        for module in here:
            for shared in (*module.modules(), *module.parameters(), *module.buffers()):
                self._made[id(shared)] = (shared, shared)

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with empty parameters."""
        if id(module) not in self._made:
            copied = copy.copy(module)
            self._made[id(module)] = (module, copied)
            copied._parameters = {name: self._tensor(param, _empty) for name, param in module._parameters.items()}  # type: ignore[misc]
            copied._buffers = {name: self._tensor(buffer, _zeros) for name, buffer in module._buffers.items()}
            copied._modules = {name: child if child is None else self(child) for name, child in module._modules.items()}
        return self._made[id(module)][1]

    def _tensor(self, tensor: torch.Tensor | None, make: Callable[[Any], torch.Tensor]) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, make(tensor))
        return self._made[id(tensor)][1]


def _empty(param: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(torch.empty((0, *param.shape[1:]), dtype=param.dtype), param.requires_grad)
    mark_tp_shard(made, TpShard(param.shape, 0, (), elsewhere=True))
    return made


def _zeros(buffer: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(buffer, device="cpu")


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the states of Python's, numpy's and torch's random generators at the end of the context."""
    import numpy

    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
