"""DeepSpeed's engine methods that take arguments or change something, as a table: name -> function of the engine and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from hf_zero.checkpoint import engine_checkpoints as checkpoints
from hf_zero.core.offloaded_states import offload_states, reload_states, require_states
from hf_zero.core.schedule.gathered_parameters import GatheredParameters
from hf_zero.errors import ConfigError, StateError


def empty_partition_cache(engine: Any) -> None:
    """Releases what is gathered between forwards; parameters small enough to stay gathered for good do."""
    engine.runtime.reshard_for_update()


def allreduce_gradients(engine: Any, *_args: Any, **_kwargs: Any) -> None:
    """Nothing to do: backward reduces."""


def module_state_dict(engine: Any, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
    """The wrapped module's ``state_dict``: at stage 3 of empty tensors, unless called inside ``GatheredParameters``."""
    state: dict[str, Any] = engine.module.state_dict(*args, **kwargs)
    if exclude_frozen_parameters:
        prefix = kwargs.get("prefix", "")
        for name, param in engine.module.named_parameters():
            if not param.requires_grad:
                state.pop(prefix + name, None)
    return state


def load_module_state_dict(
    engine: Any, state_dict: dict[str, Any], strict: bool = True, custom_load_fn: Callable[..., Any] | None = None, **kwargs: Any
) -> None:
    """Loads whole weights into the module; collective at stage 3, where rank 0's values count. Masters follow.

    Args:
        engine: The engine.
        state_dict: Whole weights by name, the same on every rank; at stage 3 only rank 0's are read.
        strict: All names must fit.
        custom_load_fn: Called with ``src=`` and ``dst=`` in place of ``load_state_dict``.
        kwargs: Ignored: ``fetch_z3_params`` is what happens at stage 3.

    Raises:
        StateError: State of the engine waits on the host.
    """
    require_states(engine, "load_module_state_dict()")
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0, enabled=engine.policy.shards_parameters):
        if custom_load_fn is not None:
            custom_load_fn(src=state_dict, dst=engine.module)
        else:
            engine.module.load_state_dict(state_dict, strict=strict)
    for unit in engine.units:
        unit.own.refresh_master()


@contextmanager
def coalesce_grad_reduction(engine: Any) -> Iterator[None]:
    """All backwards inside are one optimizer step's, whatever ``gradient_accumulation_steps`` says; ``step`` comes after.

    At stages 0 and 1 gradients stay whole and local inside, and are reduced once at the end. At stages 2 and 3 each backward reduces,
    because only shards are kept.

    Raises:
        StateError: The engine has no optimizer.
    """
    if engine.stepper is None:
        raise StateError("coalesce_grad_reduction() on an engine without optimizer: there are no gradients to reduce")
    with engine.no_sync():
        yield
    if engine.accumulation.completed() and engine.policy.allows_deferral:
        engine.stepper.reducer.reduce_deferred()


def set_train_batch_size(engine: Any, train_batch_size: int) -> None:
    """Changes the number of micro-steps per optimizer step, so that a step sees ``train_batch_size`` samples from the next one on.

    Raises:
        ConfigError: It is no multiple of the samples of one micro-step.
    """
    batch = engine.resolved.batch
    per_micro_step = batch.micro * batch.world_size
    if train_batch_size <= 0 or train_batch_size % per_micro_step:
        raise ConfigError(
            f"set_train_batch_size({train_batch_size}): not a multiple of {per_micro_step}, which is train_micro_batch_size_per_gpu "
            f"{batch.micro} x {batch.world_size} ranks"
        )
    _set_batch(engine, total=train_batch_size, accumulation=train_batch_size // per_micro_step)


def set_train_micro_batch_size(engine: Any, micro_batch_size: int) -> None:
    """Says how many samples a micro-step of one rank has from now on; the number of micro-steps stays.

    Raises:
        ConfigError: It is not positive.
    """
    if micro_batch_size <= 0:
        raise ConfigError(f"set_train_micro_batch_size({micro_batch_size}): must be at least 1")
    batch = engine.resolved.batch
    _set_batch(engine, micro=micro_batch_size, total=micro_batch_size * batch.accumulation * batch.world_size)


def _set_batch(engine: Any, **sizes: int) -> None:
    engine.resolved = replace(engine.resolved, batch=replace(engine.resolved.batch, **sizes))
    engine.accumulation.steps = engine.resolved.batch.accumulation


def deepspeed_io(
    engine: Any,
    dataset: Any,
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
    num_local_io_workers: int | None = None,
) -> DataLoader[Any]:
    """A loader of this rank's part of ``dataset``, in batches of ``batch_size`` (default: the micro-batch).

    Args:
        engine: The engine.
        dataset: Map-style or iterable.
        batch_size: Samples per batch and rank.
        route: "train" shuffles, "eval" and "predict" keep the order.
        pin_memory: Page-locked batches, where there is an accelerator.
        data_sampler: In place of a ``DistributedSampler``.
        collate_fn: In place of the one given to ``initialize``.
        num_local_io_workers: Processes that load.
    """
    batch = batch_size if batch_size is not None else engine.resolved.batch.micro
    drop_last = engine.settings.dataloader_drop_last
    if data_sampler is None and hasattr(dataset, "__len__") and not isinstance(dataset, torch.utils.data.IterableDataset):
        axis, slices = engine.collectives, engine.slices
        groups, place = (axis.world, axis.rank) if slices is None else (slices.axes.groups, slices.axes.place)
        data_sampler = torch.utils.data.DistributedSampler(dataset, groups, place, shuffle=route == "train", drop_last=drop_last)
    return DataLoader(
        dataset,
        batch_size=batch,
        sampler=data_sampler,
        collate_fn=collate_fn or engine.collate_fn,
        drop_last=drop_last,
        pin_memory=pin_memory and engine.collectives.topology.device.type != "cpu",
        num_workers=num_local_io_workers or 0,
    )


def refuse_copy(engine: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of an engine.

    Raises:
        StateError: Always; its process groups, hooks and optimizer belong to one module.
    """
    raise StateError(
        "copy.deepcopy of an engine: its hooks, process groups and optimizer belong to one module. Copy the module, "
        "copy.deepcopy(engine.module), and give the copy to deepspeed.initialize or accelerator.prepare; to have whole weights, copy it "
        "inside `with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):`"
    )


METHODS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        allreduce_gradients,
        coalesce_grad_reduction,
        deepspeed_io,
        empty_partition_cache,
        load_module_state_dict,
        module_state_dict,
        offload_states,
        reload_states,
        set_train_batch_size,
        set_train_micro_batch_size,
    )
}
METHODS["wait_for_checkpoint"] = checkpoints.wait
METHODS["__deepcopy__"] = refuse_copy
METHODS["save_fp16_model"] = lambda engine, *args, **kwargs: engine.save_16bit_model(*args, **kwargs)
