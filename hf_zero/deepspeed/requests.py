"""DeepSpeed's engine methods that take arguments or change something, as functions of the engine; its class binds them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from hf_zero.checkpoint.format.names import MASTER, shard_file
from hf_zero.core.offloaded_states import KINDS
from hf_zero.core.schedule.gathered_parameters import GatheredParameters
from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.errors import ConfigError, StateError
from hf_zero.observe import warn_once


def empty_partition_cache(engine: ConfiguredEngine) -> None:
    """Release parameters that are gathered between forwards; parameters small enough to stay gathered for good are kept."""
    engine.runtime.reshard_for_update()


def allreduce_gradients(engine: ConfiguredEngine, *_args: Any, **_kwargs: Any) -> None:
    """Do nothing: backward reduces."""


def module_state_dict(engine: ConfiguredEngine, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Return the wrapped module's ``state_dict``: at stage 3 of empty tensors, unless called inside ``GatheredParameters``."""
    state: dict[str, Any] = engine.module.state_dict(*args, **kwargs)
    if exclude_frozen_parameters:
        prefix = kwargs.get("prefix", "")
        for name, param in engine.module.named_parameters():
            if not param.requires_grad:
                state.pop(prefix + name, None)
    return state


def load_module_state_dict(
    engine: ConfiguredEngine,
    state_dict: dict[str, Any],
    strict: bool = True,
    custom_load_fn: Callable[..., Any] | None = None,
    **kwargs: Any,
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
    engine.offloaded_states.require_none("load_module_state_dict()")
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0, enabled=engine.stage_policy.parameters_sharded):
        if custom_load_fn is not None:
            custom_load_fn(src=state_dict, dst=engine.module)
        else:
            engine.module.load_state_dict(state_dict, strict=strict)
    engine.progress.loads += 1
    for unit in engine.units:
        unit.own.refresh_master()


@contextmanager
def no_sync(engine: ConfiguredEngine) -> Iterator[None]:
    """Treat backwards inside the ``with`` as not the last of an optimizer step, as DDP's ``no_sync`` does.

    At stages 0 and 1 they reduce nothing, and the first backward after the block reduces all of them. At stages 2 and 3, where DeepSpeed
    refuses the block, each reduces, because only shards of gradients are kept. Nothing steps inside.

    Raises:
        StateError: Another such block is open, or (in ``step``) one steps inside.
    """
    if engine.accumulation.in_no_sync:
        raise StateError("no_sync context manager reentry is unsupported: leave the block that is open first")
    with ConfiguredEngine.no_sync(engine, steps=False):
        yield


@contextmanager
def coalesce_grad_reduction(engine: ConfiguredEngine) -> Iterator[None]:
    """Treat all backwards inside the ``with`` as one optimizer step's, whatever ``gradient_accumulation_steps`` says; ``step`` comes after.

    At stages 0 and 1 gradients stay whole and local inside, and are reduced once at the end. At stages 2 and 3 each backward reduces,
    because only shards are kept.

    Raises:
        StateError: The engine has no optimizer.
    """
    if engine.stepper is None:
        raise StateError("coalesce_grad_reduction() on an engine without optimizer: there are no gradients to reduce")
    with ConfiguredEngine.no_sync(engine):
        yield
    if engine.accumulation.completed():
        engine.stepper.reducer.complete(engine.stage_policy.allows_deferral)


def optimizer_file(engine: ConfiguredEngine, checkpoints_path: str | os.PathLike[str], tag: Any, expp_rank: int = 0) -> str:
    """Return the file of a checkpoint that holds this rank's masters; the optimizer's states lie beside it.

    Args:
        engine: The engine.
        checkpoints_path: Folder of all checkpoints of a run.
        tag: Name of the checkpoint.
        expp_rank: Has no effect: what a rank holds of experts is in its file too.
    """
    data, model = engine.collectives.data, engine.collectives.topology.model
    parts = (model.rank, model.world) if model is not None else (0, 1)
    return os.path.join(checkpoints_path, str(tag), shard_file(MASTER, data.rank, data.world, *parts))


def train_batch(engine: ConfiguredEngine, data_iter: Iterator[Mapping[str, Any]]) -> torch.Tensor:
    """Trains one batch, ``gradient_accumulation_steps`` micro-batches and a step, over ``pipeline.stages`` as ``pipeline.schedule`` has it.

    DeepSpeed has this for a ``PipelineModule`` alone. As ``pipeline.train.train_batch``, where what it takes and raises is written.
    """
    from hf_zero.pipeline.train import train_batch as train  # schedules of torch, which other engines do not need

    return train(engine, data_iter)


def set_train_batch_size(engine: ConfiguredEngine, train_batch_size: int) -> None:
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


def set_train_micro_batch_size(engine: ConfiguredEngine, micro_batch_size: int) -> None:
    """Says how many samples a micro-step of one rank has from now on; the number of micro-steps stays.

    Raises:
        ConfigError: It is not positive.
    """
    if micro_batch_size <= 0:
        raise ConfigError(f"set_train_micro_batch_size({micro_batch_size}): must be at least 1")
    batch = engine.resolved.batch
    _set_batch(engine, micro=micro_batch_size, total=micro_batch_size * batch.accumulation * batch.world_size)


def set_gradient_clipping(engine: ConfiguredEngine, max_norm: float) -> None:
    """Clips the global norm to ``max_norm`` from the coming step on; 0 clips nothing. Every rank must call it with the same number."""
    if engine.stepper is not None:
        engine.stepper.settings = replace(engine.stepper.settings, max_norm=max_norm)
    engine.settings = engine.settings.model_copy(update={"gradient_clipping": max_norm})
    engine.resolved = replace(engine.resolved, config=engine.settings)


def _set_batch(engine: ConfiguredEngine, **sizes: int) -> None:
    engine.resolved = replace(engine.resolved, batch=replace(engine.resolved.batch, **sizes))
    engine.accumulation.steps = engine.resolved.batch.accumulation
    engine.samples_per_step = engine.resolved.batch.total


def deepspeed_io(
    engine: ConfiguredEngine,
    dataset: Any,
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
    num_local_io_workers: int | None = None,
) -> DataLoader[Any]:
    """Make a loader of this rank's part of ``dataset``, in batches of ``batch_size`` (default: the micro-batch).

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
        axes = engine.collectives.topology
        data_sampler = torch.utils.data.DistributedSampler(
            dataset, axes.replicas, axes.replica, shuffle=route == "train", drop_last=drop_last
        )
    return DataLoader(
        dataset,
        batch_size=batch,
        sampler=data_sampler,
        collate_fn=collate_fn or engine.collate_fn,
        drop_last=drop_last,
        pin_memory=pin_memory and engine.collectives.topology.device.type != "cpu",
        num_workers=num_local_io_workers or 0,
    )


def offload_states(
    engine: ConfiguredEngine, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
) -> None:
    """Moves state of an idle engine to host memory; local. Until ``reload_states`` it can neither train nor be saved.

    A forward, ``GatheredParameters`` and the like go on working while the parameters stay where they are: without "lp_params" and, where
    the masters are the parameters themselves (fp32), without "hp_params".

    On a machine without accelerator, and for state that the configuration offloads, there is nothing to move.

    Args:
        engine: The engine.
        include: ``OffloadStateTypeEnum`` members or their names; None is everything.
        device: Only the host: ``OffloadDeviceEnum.cpu``, "cpu" or "none" (nothing is moved).
        pin_memory: Page-lock the copies. That memory stays with the engine for the next time, until ``destroy``.
        non_blocking: Changes nothing: copies to page-locked memory never wait.

    Raises:
        ConfigError: An unknown kind or device.
        StateError: The engine is in the middle of a forward or a backward, or of a forward whose backward may still come.
    """
    kinds = KINDS if include is None else tuple(getattr(kind, "value", kind) for kind in include)
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"offload_states(include=...): {kind!r} is no kind of state; there are {', '.join(KINDS)}")
    where = str(getattr(device, "value", device))
    if where == "none":
        return
    if where != "cpu":
        raise ConfigError(f"offload_states(device={where!r}): state of an idle engine goes to 'cpu' only")
    if not engine.runtime.idle:
        raise StateError(
            "offload_states() was called during a forward or backward, or between a forward and its backward. Call it after "
            "backward() and step(). Run forwards without a backward under torch.no_grad(), or delete their outputs"
        )
    if engine.collectives.topology.device.type == "cpu":
        warn_once("offload_states(): nothing to move, the engine lives in host memory already")
        return
    engine.offloaded_states.move(kinds, pin_memory)


def reload_states(engine: ConfiguredEngine, non_blocking: bool = False) -> None:
    """Move the state back that ``offload_states`` moved to the host; local. Does nothing when nothing was moved."""
    engine.offloaded_states.bring_back(non_blocking)
