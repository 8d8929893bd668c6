"""Provide small functions, types and loaders that scripts import from various modules of DeepSpeed."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, TypeVar

import torch
from packaging import version
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from hf_zero.core.offloaded_states import KINDS
from hf_zero.deepspeed.served.accelerator import get_accelerator
from hf_zero.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])

# What `initialize` takes in place of an optimizer and of a scheduler.
DeepSpeedOptimizerCallable = Callable[[Iterable[torch.nn.Parameter] | list[dict[str, Any]]], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], LRScheduler]

_CPU = torch.device("cpu")


def set_random_seed(seed: int) -> None:
    """Seed the random generators of Python, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], item: Any) -> Any:
    """Return ``item`` with ``function`` applied to its tensors, in containers of torch's pytree and in other mappings."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Mapping):  # of a kind that pytree does not know
            pairs = ((key, map_tensors(function, inner)) for key, inner in value.items())
            return type(value)(pairs) if isinstance(value, dict) else dict(pairs)
        return function(value) if isinstance(value, torch.Tensor) else value

    return pytree.tree_map(leaf, item)


def move_to_device(item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return ``item`` with its tensors moved to ``device``, also inside lists, tuples and dicts.

    Args:
        item: A tensor, a container or any other object.
        device: Target device.
        criterion_func: Function of a tensor that returns whether to move it.
    """
    return map_tensors(lambda tensor: tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor, item)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """Clone every tensor in nested dicts, lists and tuples.

    ``torch.save`` would write a view of a unit's buffer together with the complete buffer (and safetensors would treat it as shared
    memory); a clone has only its own elements. Tensors that are the same view (tied weights under two names) get one clone, so that they
    stay tied in the file.

    Args:
        item: A tensor, or nested dicts, lists and tuples; other leaves are returned unchanged.
        device: Device of the clones.

    Returns:
        The same structure (with subclasses of dict and named tuples), each tensor detached and contiguous on ``device``.
    """
    made: dict[tuple[Any, ...], torch.Tensor] = {}

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        if not _has_address(tensor):
            return tensor.detach().to(device, copy=True).contiguous()
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if view not in made:
            made[view] = tensor.detach().to(device, copy=True).contiguous()
        return made[view]

    return map_tensors(clone, item)


def _has_address(tensor: torch.Tensor) -> bool:
    """Return whether equal addresses of ``tensor`` and another tensor imply equal elements; False without an address, and for unknown
    subclasses.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_meta
    )


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text: ``call_to_str("f", 1, b=2)`` is ``"f(1, b=2)"``."""
    return f"{base}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return borders (num_parts + 1) that divide ``num_items`` items evenly; with a remainder, the first parts are one item longer."""
    size, rest = divmod(num_items, num_parts)
    return [part * size + min(part, rest) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return borders (num_parts + 1) of contiguous parts that minimise the largest total weight of a part."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    sums = [0, *accumulate(weights)]
    # Bisection over the largest weight of a part, which is the sum of some consecutive items.
    candidates = sorted({sums[stop] - sums[start] for start in range(len(sums)) for stop in range(start + 1, len(sums))})
    limit = candidates[bisect_left(candidates, True, key=lambda most: _borders(sums, most, num_parts) is not None)]
    return _borders(sums, limit, num_parts) or []


def _borders(sums: Sequence[float], most: float, num_parts: int) -> list[int] | None:
    """Return borders of ``num_parts`` non-empty parts of a total weight of at most ``most`` each; None if that is impossible."""
    borders, items = [0], len(sums) - 1
    for part in range(num_parts):
        end = borders[-1]
        while end < items - (num_parts - part - 1) and sums[end + 1] - sums[borders[-1]] <= most:
            end += 1
        if end == borders[-1]:
            return None
        borders.append(end)
    return borders if borders[-1] == items else None


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register ``hook``, which is called with ``param`` after its gradient was accumulated; return a handle with ``remove()``."""
    return param.register_post_accumulate_grad_hook(hook)


def is_compile_supported() -> bool:
    """Return True, because every supported PyTorch has ``torch.compile``."""
    return True


def noop_decorator(func: Function) -> Function:
    """Return the function itself."""
    return func


def empty_cache() -> None:
    """Release the allocator's unused memory to the device."""
    get_accelerator().empty_cache()


def get_ma_status() -> int:
    """Return the bytes allocated on the device; on a CPU the bytes of the process."""
    return int(get_accelerator().memory_allocated())


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Return whether torch's version (its first two numbers) is between ``min_version`` and ``max_version``, inclusive."""
    present = version.parse(".".join(torch.__version__.split(".")[:2]))
    return (min_version is None or present >= version.parse(str(min_version))) and (
        max_version is None or present <= version.parse(str(max_version))
    )


def is_model_parallel_parameter(param: torch.Tensor) -> bool:
    """Return whether a script's own model parallelism has marked the parameter (``model_parallel``, ``tensor_model_parallel``)."""
    return bool(getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False))


def is_zero_param(parameter: Any) -> bool:
    """Return whether stage 3 shards the parameter."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the module or parameter of ``model`` with a dotted name."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Replace the module of ``model`` with a dotted name by ``module``."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def set_autotp_mode(training: bool = False) -> None:
    """Do nothing, because a model is split for training after it was built, without preparation."""


def is_autotp_training_mode() -> bool:
    """Return True, because training is the only mode."""
    return True


class RepeatingLoader:
    """An iterator that restarts ``loader`` whenever it ends; each pass is an epoch for a sampler with ``set_epoch``.

    Args:
        loader: A non-empty iterable that can be iterated several times.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self.epoch += 1
            set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
            self._batches = iter(self.loader)
            return next(self._batches)


class DeepSpeedDataLoader(DataLoader[Any]):
    """A loader of this rank's part of ``dataset``, with DeepSpeed's arguments; its sampler is also ``data_sampler``.

    Args:
        dataset: Map-style or iterable dataset.
        batch_size: Samples per batch and rank.
        pin_memory: Whether batches are page-locked, if there is an accelerator.
        local_rank: A negative number draws from the whole dataset on each rank, if ``data_sampler`` is None.
        tput_timer: Object whose ``start`` is called before each batch; None for none.
        collate_fn: Collate function; None uses torch's.
        num_local_io_workers: Number of worker processes; None is 0.
        data_sampler: Sampler; None uses a ``DistributedSampler``.
        data_parallel_world_size: Number of parts of the dataset; None is one per rank.
        data_parallel_rank: This rank's part.
        dataloader_drop_last: Whether an incomplete last batch is left out.
        deepspeed_dataloader_config: Settings of curriculum learning; must be empty.

    Raises:
        ConfigError: There are settings of curriculum learning.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        if deepspeed_dataloader_config:
            raise ConfigError(
                f"DeepSpeedDataLoader(deepspeed_dataloader_config={deepspeed_dataloader_config!r}): of data efficiency there is "
                "CurriculumScheduler alone. Leave the argument out; order the samples in the dataset or the sampler"
            )
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            each = RandomSampler(dataset) if local_rank < 0 else None
            data_sampler = each or DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
        self.data_sampler, self.tput_timer = data_sampler, tput_timer
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            collate_fn=collate_fn,
            drop_last=dataloader_drop_last,
            pin_memory=pin_memory and get_accelerator().device_name() != "cpu",
            num_workers=num_local_io_workers or 0,
        )

    def __iter__(self) -> Any:
        return super().__iter__() if self.tput_timer is None else self._timed()

    def _timed(self) -> Iterator[Any]:
        batches = super().__iter__()
        while True:
            self.tput_timer.start()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch


def get_state_devices(model: Any, state: Any) -> set[torch.device]:
    """Return the current devices of one kind of state of an engine; local.

    Args:
        model: The engine.
        state: A member of ``OffloadStateTypeEnum``, or its name.

    Returns:
        A set of devices; empty if no such state exists now (for example gradients after a step).

    Raises:
        ConfigError: The kind is unknown.
    """
    kind = str(getattr(state, "value", state))
    if kind not in KINDS:
        raise ConfigError(f"get_state_devices(state={kind!r}): not a kind of state; allowed are {', '.join(KINDS)}")
    devices: set[torch.device] = model.offloaded_states.devices(kind)
    return devices
