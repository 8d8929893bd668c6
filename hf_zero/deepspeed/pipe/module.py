"""Define ``PipelineModule``: a model that is a list of layers, divided over pipeline stages."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.assembly.mesh import CLAIMS
from hf_zero.comm.bootstrap import init_distributed
from hf_zero.comm.topology import require_divisor
from hf_zero.config.mesh import Claim
from hf_zero.deepspeed.pipe.building import Layer, TiedLayerSpec, build_layers, name_of, require_dimensions, require_layers, without_values
from hf_zero.deepspeed.pipe.grid import PipelineParallelGrid, require_fit
from hf_zero.deepspeed.pipe.topology import PipeDataParallelTopology, ProcessTopology
from hf_zero.deepspeed.served.checkpointing import checkpoint
from hf_zero.deepspeed.served.helpers import partition_balanced, partition_uniform, set_random_seed
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.pipeline.plan import ItemCall, PipelinePlan


@dataclass
class Recomputation:
    """The settings that select the layers to recompute in backward.

    Attributes:
        interval: Number of layers that are recomputed together; 0 keeps all activations.
        function: Function ``f(function, *args)`` that recomputes.
        classes: Class names of the layers that may be recomputed; None is all layers with parameters.
    """

    interval: int
    function: Callable[..., Any]
    classes: Sequence[str] | None = None

    def fits(self, layers: Sequence[LayerCall]) -> bool:
        """Return whether ``layers`` may be recomputed together: all are of ``classes``; or, if that is None, one has parameters."""
        modules = [layer.module for layer in layers]
        if self.classes is not None:
            return all(type(module).__name__ in self.classes for module in modules)
        return any(module is not None and next(module.parameters(), None) is not None for module in modules)


@dataclass(frozen=True)
class LayerCall:
    """One entry in the list of layers.

    Attributes:
        module: The layer; None for a function.
        run: Function that runs the entry on the result of the previous entry.
    """

    module: nn.Module | None
    run: Callable[[Any], Any]


class RunOfLayers(nn.Module):
    """A module that runs the layers of one stage without registering them, because their names are those of the complete list.

    Args:
        calls: Entries of the layers.
        recomputation: Layers to recompute; may be changed while the model trains.
    """

    def __init__(self, calls: Sequence[LayerCall], recomputation: Recomputation) -> None:
        super().__init__()
        self.calls = tuple(calls)
        self.recomputation = recomputation

    def forward(self, inputs: Any) -> Any:
        """Return the output of the last layer for the input of the first: a tensor or a tuple of tensors."""
        interval = self.recomputation.interval if torch.is_grad_enabled() else 0
        for start in range(0, len(self.calls), interval or len(self.calls)):
            layers = self.calls[start : start + interval] if interval else self.calls
            if interval and self.recomputation.fits(layers):
                inputs = self.recomputation.function(_Chain(layers), *(inputs if isinstance(inputs, tuple) else (inputs,)))
            else:
                inputs = _run(layers, inputs)
        return inputs


class _Chain:
    """A function that runs consecutive layers on the elements of their input as separate arguments, as recomputation requires."""

    __name__ = __qualname__ = "layers of a pipeline"

    def __init__(self, layers: Sequence[LayerCall]) -> None:
        self._layers = layers

    def __call__(self, *parts: Any) -> Any:
        return _run(self._layers, parts[0] if len(parts) == 1 else parts)


def _run(layers: Sequence[LayerCall], inputs: Any) -> Any:
    for layer in layers:
        inputs = layer.run(inputs)
    return inputs


def stage_borders(method: str, sizes: Sequence[int], names: Sequence[str], stages: int) -> list[int]:
    """Return the borders of the stages (``stages`` + 1): stage s has the layers ``borders[s]`` to ``borders[s + 1] - 1``, at least one.

    Args:
        method: ``uniform`` (balance the number of layers), ``parameters`` (balance the trainable elements) or ``type:REGEX`` (balance the
            number of layers whose class name contains a match of the expression, ignoring case).
        sizes: Number of trainable elements of each layer.
        names: Class name of each layer.
        stages: Number of stages.

    Raises:
        ConfigError: There are fewer layers than stages, the method is unknown, or the expression is wrong or matches nothing.
    """
    if len(sizes) < stages:
        raise ConfigError(
            f"a PipelineModule of {len(sizes)} layer(s) over {stages} stages: each stage needs one; set num_stages to {len(sizes)} or less"
        )
    kind, _, pattern = method.partition(":")
    match kind.lower():
        case "uniform":
            return partition_uniform(len(sizes), stages)
        case "parameters":
            return partition_balanced(sizes, stages)
        case "type" if pattern:
            return partition_balanced(_matches(pattern, names), stages)
    raise ConfigError(f"partition_method is {method!r}; 'uniform', 'parameters' or 'type:REGEX' (the name of a layer's class) is allowed")


def _matches(pattern: str, names: Sequence[str]) -> list[int]:
    try:
        found = [int(re.search(pattern, name, re.IGNORECASE) is not None) for name in names]
    except re.error as error:
        raise ConfigError(f"partition_method 'type:{pattern}' is not a regular expression: {error}") from None
    if not any(found):
        raise ConfigError(f"partition_method 'type:{pattern}' matches no layer; there are {', '.join(dict.fromkeys(names))}")
    return found


class PipelineModule(nn.Module):
    """A model of layers that run one after the other, each on the result of the previous one: a tensor, or a tuple of tensors.

    Layer ``i`` has the name ``i`` in state dicts, a tied layer ``tied_modules.<key>``. This rank has values for its own stage's layers only
    ([Note: layers of other stages]), and shapes for the others. A direct call, with one stage, returns the result of the last layer, or
    with ``labels`` the loss.

    Args:
        layers: Modules, ``LayerSpec``, ``TiedLayerSpec`` and functions.
        num_stages: Number of stages; must divide the number of ranks.
        topology: Grid of ranks, instead of ``num_stages``; gives the number of stages and the position of each rank.
        loss_fn: Function ``loss_fn(outputs, labels)`` that returns a scalar; None if the last layer returns the loss.
        seed_layers: Whether each layer is built with its own seed, ``base_seed`` plus its number.
        seed_fn: Function that is called with the seed; None seeds the generators of Python, numpy and torch.
        base_seed: Seed of the first layer.
        partition_method: ``uniform``, ``parameters`` or ``type:REGEX`` (see ``stage_borders``).
        activation_checkpoint_interval: Number of layers that are recomputed together; 0 keeps all activations.
        activation_checkpoint_func: Function ``f(function, *args)`` that recomputes.
        checkpointable_layers: Class names of the layers that may be recomputed; None is all layers with parameters.
        dynamic_shape: Has no effect, because shapes may always change from batch to batch.

    Attributes:
        loss_fn: The argument ``loss_fn``.
        num_stages: Number of stages.
        stage_id: Stage of this rank.
        parts: Borders (``num_stages`` + 1) of the stages in the list of layers.
        tied_modules: Tied layers by key.
        stages: Module that runs the layers of each stage; it registers no parameters.
        recomputation: The settings of recomputation; may be changed.

    Raises:
        ConfigError: Neither or both of ``num_stages`` and ``topology`` are given, they do not fit the ranks, there are fewer layers than
            stages, or an entry is not a layer.
        UnsupportedError: A parameter has no dimension, and there are several stages.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        init_distributed()
        self._grid = PipelineParallelGrid(_topology(num_stages, topology))
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        self.loss_fn = loss_fn
        self.recomputation = Recomputation(activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers)
        self.dynamic_shape = dynamic_shape
        specs = require_layers(layers)
        shapes = [without_values(layer) for layer in specs]
        if self.num_stages > 1:
            require_dimensions(specs, shapes)
        self.parts = stage_borders(partition_method, [_trainable(shape) for shape in shapes], list(map(name_of, specs)), self.num_stages)
        own = [self.parts[self.stage_id] <= place < self.parts[self.stage_id + 1] for place in range(len(specs))]
        seed = (lambda place: (seed_fn or set_random_seed)(base_seed + place)) if seed_layers else None
        self.tied_modules = nn.ModuleDict()
        calls = self._register(specs, build_layers(specs, shapes, own, seed))
        self.stages = nn.ModuleList(
            RunOfLayers(calls[start:stop], self.recomputation) for start, stop in zip(self.parts, self.parts[1:], strict=False)
        )
        self._no_split_modules = _repeated(self)
        setattr(
            self, CLAIMS, (Claim("pp", self.num_stages, "PipelineModule(num_stages)" if topology is None else "PipelineModule(topology)"),)
        )

    def _register(self, layers: Sequence[Layer], modules: Sequence[nn.Module | None]) -> list[LayerCall]:
        calls = []
        for place, (layer, module) in enumerate(zip(layers, modules, strict=True)):
            if module is None:
                calls.append(LayerCall(None, layer))  # type: ignore[arg-type]
            elif isinstance(layer, TiedLayerSpec):
                self.tied_modules[layer.key] = module
                calls.append(LayerCall(module, module if layer.forward_fn is None else partial(layer.forward_fn, module)))
            else:
                self.add_module(str(place), module)
                calls.append(LayerCall(module, module))
        return calls

    @property
    def activation_checkpoint_interval(self) -> int:
        """Return the number of layers that are recomputed together; 0 keeps all activations. It can be set."""
        return self.recomputation.interval

    @activation_checkpoint_interval.setter
    def activation_checkpoint_interval(self, interval: int) -> None:
        self.recomputation.interval = interval

    @property
    def activation_checkpoint_func(self) -> Callable[..., Any]:
        """Return the function ``f(function, *args)`` that recomputes. It can be set."""
        return self.recomputation.function

    @activation_checkpoint_func.setter
    def activation_checkpoint_func(self, function: Callable[..., Any]) -> None:
        self.recomputation.function = function

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """Return this rank's layers in order: modules, functions, and functions that run a tied layer. They may be called; changes of the
        list have no effect.
        """
        return [call.run for call in self.stages[self.stage_id].calls]  # type: ignore[union-attr]

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set ``activation_checkpoint_interval``."""
        self.recomputation.interval = interval

    def forward(self, forward_input: Any, labels: Any = None) -> Any:
        """Return the output of the last layer, or the loss if ``labels`` are given and there is a ``loss_fn``.

        Args:
            forward_input: A tensor or a tuple of tensors.
            labels: Second argument of ``loss_fn``.
        """
        outputs = forward_input
        for stage in self.stages:
            outputs = stage(outputs)
        return outputs if labels is None else self.loss_of(outputs, labels)

    def loss_of(self, outputs: Any, labels: Any) -> torch.Tensor:
        """Return the loss of the last layer's output; the output itself if there is no ``loss_fn``.

        Raises:
            ConfigError: The loss is not a scalar.
        """
        loss = outputs if self.loss_fn is None else self.loss_fn(outputs, labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            made = "the result of the last layer (there is no loss_fn)" if self.loss_fn is None else "the result of loss_fn"
            shown = f"a tensor {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(f"PipelineModule: {made} is the loss and must be a tensor of one number, but is {shown}")
        return loss.reshape(())

    def get_additional_losses(self) -> Mapping[str, torch.Tensor] | None:
        """Return further losses of the last micro-batch to report, by name; None here, a subclass may return some."""
        return None

    def pipeline_plan(self) -> PipelinePlan:
        """Return the plan that assigns the parameters of layers to stages; shapes at borders become known when the stages run.

        All stages hold the parameters that belong to no layer (for example those of a subclass).
        """
        stages: dict[int, set[int]] = {}
        last = self.num_stages - 1
        users = [(index, call.module) for index, run in enumerate(self.stages) for call in run.calls]  # type: ignore[union-attr]
        for index, module in [*users, (last, self.loss_fn if isinstance(self.loss_fn, nn.Module) else None)]:
            for param in module.parameters() if module is not None else ():
                stages.setdefault(id(param), set()).add(index)
        everyone = range(self.num_stages)
        holders = {name: tuple(sorted(stages.get(id(param), everyone))) for name, param in self.named_parameters()}
        calls = tuple(ItemCall(f"stages.{index}", 0, index) for index in everyone)
        return PipelinePlan(self.num_stages, calls, ((),) * last, holders)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile this rank's layers with ``torch.compile`` and its arguments."""
        self.stages[self.stage_id].compile(*args, **kwargs)

    def topology(self) -> ProcessTopology:
        """Return the topology of the ranks."""
        return self._grid.topology()

    def mpu(self) -> PipelineParallelGrid:
        """Return the groups of ranks."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Return the number of stages."""
        return self.num_stages

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that runs layer ``layer_idx``.

        Raises:
            ConfigError: ``layer_idx`` is out of range.
        """
        if not 0 <= layer_idx < self.parts[-1]:
            raise ConfigError(f"stage_owner({layer_idx}): layers are numbered from 0 to {self.parts[-1] - 1}")
        return bisect_right(self.parts, layer_idx) - 1


def require_undivided(model: PipelineModule) -> None:
    """Refuse an engine for a topology that splits layers over ranks; scripts with one stage use only the layers of such a module.

    Raises:
        UnsupportedError: The axis ``model`` of the topology has several ranks.
    """
    if model.mpu().slice_parallel_size > 1:
        raise UnsupportedError(
            f"PipelineModule(topology={model.topology()}): layers split over the ranks of a 'model' axis are not trained "
            "here. Use PipeDataParallelTopology, or put the layers into an nn.Sequential with your mpu and no pipeline. "
            "Hugging Face models can combine both: pipeline.stages with tensor_parallel.autotp_size"
        )


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    """Return the topology that ``num_stages`` or ``topology`` describes.

    Raises:
        ConfigError: Neither or both are given, or they do not fit the ranks.
    """
    world = dist.get_world_size()
    if topology is None and num_stages is None:
        raise ConfigError("PipelineModule() needs num_stages= or topology=")
    if topology is not None:
        if num_stages is not None and num_stages != topology.get_dim("pipe"):
            raise ConfigError(
                f"PipelineModule(num_stages={num_stages}, topology={topology}): they say different numbers of stages; leave num_stages out"
            )
        return require_fit(topology, world)
    assert num_stages is not None
    require_divisor(num_stages, world, "PipelineModule(num_stages)")
    return PipeDataParallelTopology(num_stages, world // num_stages)


def _trainable(module: nn.Module | None) -> int:
    return sum(param.numel() for param in module.parameters() if param.requires_grad) if module is not None else 0


def _repeated(model: PipelineModule) -> list[str]:
    """Return the class names of layers with parameters that occur several times: each such layer becomes a block of the engine."""
    layers = [module for name, module in model.named_children() if name.isdigit() and next(module.parameters(), None) is not None]
    return [name for name, count in Counter(type(layer).__name__ for layer in layers).items() if count > 1]
