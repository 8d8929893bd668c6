"""Define DeepSpeed's engine methods that take arguments or have side effects, as functions of the engine; its class binds them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hf_zero.checkpoint.format.names import MASTER, shard_file
from hf_zero.core.offloaded_states import KINDS
from hf_zero.core.schedule.gathered_parameters import GatheredParameters, gathered_while_loading
from hf_zero.core.units.names import named_params
from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.deepspeed.served.helpers import DeepSpeedDataLoader
from hf_zero.errors import ConfigError, StateError
from hf_zero.observe import warn_once


def snapshot(engine: ConfiguredEngine, client_state: Mapping[str, Any] | None = None) -> bool:
    """Take a snapshot of all that a checkpoint holds into host memory, every ``hf_zero.snapshot_steps`` optimizer steps; otherwise return
    at once. Call it after each ``step``, on every rank.

    The values are copied; a thread writes them while training goes on. Ranks that their launcher starts again load the newest snapshot with
    ``load_checkpoint`` or ``load_snapshot``.

    Args:
        engine: The engine.
        client_state: Values of the caller on this rank, as for ``save_checkpoint``.

    Returns:
        Whether a snapshot was taken.

    Raises:
        CheckpointError: On every rank, if the first snapshot finds too little memory, or a value cannot be saved.
        StateError: The engine has no optimizer.
    """
    if engine.stepper is None:
        raise StateError("snapshot() on an engine without optimizer: there is no training that could go on from it")
    with engine.clock.aside():
        return engine.checkpoints.snapshot(engine, lambda: client_state or {})


def load_snapshot(engine: ConfiguredEngine) -> tuple[str | None, dict[str, Any] | None]:
    """Load the newest snapshot of this run, if its launcher has started the ranks again; collective.

    Returns:
        The folder and the client state, as ``load_checkpoint`` does; (None, None) if there is no snapshot.

    Raises:
        CheckpointError: On every rank, if the snapshot does not fit the engine or is damaged.
    """
    folder = engine.checkpoints.snapshot_folder
    return (None, None) if folder is None else engine.load_checkpoint(folder)


def rewind_also(engine: ConfiguredEngine, *objects: Any) -> None:
    """Register schedulers and other objects of the script that a rewind restores too (``hf_zero.spike_action: "rewind"``).

    Schedulers of the engine, of Trainer and of ``accelerator.prepare`` need no registration. Without ``rewind`` the function has no
    effect.

    Args:
        engine: The engine.
        *objects: Objects with ``state_dict`` and ``load_state_dict``, the same on every rank; registered before the first step.

    Raises:
        TypeError: An object lacks one of these methods.
    """
    for one in objects:
        if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
            raise TypeError(f"rewind_also() takes objects with state_dict() and load_state_dict(), not {type(one).__name__}")
    rewinds = engine.checkpoints.rewinds
    if rewinds is not None:
        rewinds.objects += objects


def empty_partition_cache(engine: ConfiguredEngine) -> None:
    """Reshard parameters that stay gathered between forwards; small parameters that always stay gathered are kept."""
    engine.runtime.reshard_for_update()


def allreduce_gradients(engine: ConfiguredEngine, *_args: Any, **_kwargs: Any) -> None:
    """Do nothing, because backward reduces gradients."""


def broadcast_model(engine: ConfiguredEngine) -> None:
    """Do nothing: ``initialize`` has given all ranks rank 0's values. Scripts read this method to put it back after their own."""


def backward_epilogue(engine: ConfiguredEngine) -> None:
    """Do nothing: a ``loss.backward()`` ends by itself here. Scripts for DeepSpeed before 0.18.3 call this on each engine after a backward
    of a loss that engines share.
    """


def module_state_dict(engine: ConfiguredEngine, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Return the wrapped module's ``state_dict``; at stage 3 its tensors are empty, unless called inside ``GatheredParameters``."""
    state: dict[str, Any] = engine.module.state_dict(*args, **kwargs)
    if exclude_frozen_parameters:
        prefix = kwargs.get("prefix", "")
        for name, param in named_params(engine.module):
            if not param.requires_grad:
                state.pop(prefix + name, None)
    return state


def load_module_state_dict(
    engine: ConfiguredEngine,
    checkpoint: Mapping[str, Any],
    strict: bool = True,
    custom_load_fn: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> None:
    """Load unsharded weights into the module and its masters; collective at stage 3, where rank 0's values are used.

    At stage 3 the parameters of one unit after the other are whole; all of them at once with ``custom_load_fn``.

    Ranks that hold parts of layers (tensor parallelism, experts) or stages of a pipeline load what each of them holds.

    Args:
        engine: The engine.
        checkpoint: Unsharded weights by name, or a dict that has them under "module", the same on every rank; at stage 3 only rank 0's
            are read.
        strict: Whether all names must match.
        custom_load_fn: Function that is called with ``src=`` and ``dst=`` instead of ``load_state_dict``.
        kwargs: Ignored; ``fetch_z3_params`` always applies at stage 3.

    Raises:
        StateError: State of the engine is offloaded by ``offload_states``.
    """
    engine.offloaded_states.require_none("load_module_state_dict()")
    within = checkpoint.get("module")
    state_dict = within if isinstance(within, Mapping) else checkpoint
    topology, sharded = engine.collectives.topology, engine.stage_policy.parameters_sharded
    source = 0 if topology.model is None and topology.expert is None else None  # otherwise each rank loads its parts and experts
    if custom_load_fn is not None:
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=source, enabled=sharded):
            custom_load_fn(src=state_dict, dst=engine.module)
    else:
        with gathered_while_loading(engine.module, source) if sharded else nullcontext():
            engine.module.load_state_dict(state_dict, strict=strict)
    engine.progress.loads += 1
    for unit in engine.units:
        unit.own.refresh_master()


@contextmanager
def no_sync(engine: ConfiguredEngine) -> Iterator[None]:
    """Return a context whose backwards do not complete an optimizer step, like DDP's ``no_sync``.

    At stages 0 and 1 these backwards reduce nothing, and the first backward after the block reduces all their gradients. At stages 2 and 3,
    where DeepSpeed raises, each backward reduces, because only shards of gradients are kept. ``step`` must not be called inside.

    Raises:
        StateError: Another such block is open, or ``step`` is called inside (raised by ``step``).
    """
    if engine.accumulation.in_no_sync:
        raise StateError("no_sync context manager reentry is unsupported: leave the open no_sync() block first")
    with ConfiguredEngine.no_sync(engine, steps=False):
        yield


@contextmanager
def coalesce_grad_reduction(engine: ConfiguredEngine) -> Iterator[None]:
    """Return a context whose backwards belong to one optimizer step, whatever ``gradient_accumulation_steps`` is; call ``step`` after it.

    At stages 0 and 1 gradients stay unsharded and local inside, and are reduced once at the end. At stages 2 and 3 each backward reduces,
    because only shards are kept.

    Raises:
        StateError: The engine has no optimizer.
    """
    if engine.stepper is None:
        raise StateError("coalesce_grad_reduction(): this engine has no optimizer, so there are no gradients to reduce")
    with ConfiguredEngine.no_sync(engine):
        yield
    if engine.accumulation.completed():
        engine.stepper.reducer.complete(engine.stage_policy.allows_deferral)


def optimizer_file(engine: ConfiguredEngine, checkpoints_path: str | os.PathLike[str], tag: Any, expp_rank: int = 0) -> str:
    """Return the path of the checkpoint file with this rank's masters; the optimizer states are in files beside it.

    Args:
        engine: The engine.
        checkpoints_path: Folder of all checkpoints of a run.
        tag: Name of the checkpoint.
        expp_rank: Has no effect, because a rank's file also has the masters of its experts.
    """
    data, model = engine.collectives.data, engine.collectives.topology.model
    parts = (model.rank, model.world) if model is not None else (0, 1)
    return os.path.join(checkpoints_path, str(tag), shard_file(MASTER, data.rank, data.world, *parts))


def train_batch(engine: ConfiguredEngine, data_iter: Iterator[Mapping[str, Any]]) -> torch.Tensor:
    """Train one batch over the pipeline stages: ``gradient_accumulation_steps`` micro-batches and an optimizer step; collective.

    DeepSpeed has this method for a ``PipelineModule`` only. Arguments and errors are those of ``hf_zero.pipeline.train.train_batch``.
    """
    from hf_zero.pipeline.train import train_batch as train  # imports torch's pipeline schedules, which other engines do not need

    return train(engine, data_iter)


def set_train_batch_size(engine: ConfiguredEngine, train_batch_size: int) -> None:
    """Set the number of samples per optimizer step, from the next step on, by changing the number of micro-steps.

    Raises:
        ConfigError: ``train_batch_size`` is not a multiple of the samples of one micro-step.
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
    """Set the number of samples per micro-step and rank; the number of micro-steps does not change.

    Raises:
        ConfigError: The number is not positive.
    """
    if micro_batch_size <= 0:
        raise ConfigError(f"set_train_micro_batch_size({micro_batch_size}): must be at least 1")
    batch = engine.resolved.batch
    _set_batch(engine, micro=micro_batch_size, total=micro_batch_size * batch.accumulation * batch.world_size)


def set_gradient_clipping(engine: ConfiguredEngine, max_norm: float) -> None:
    """Set the clipping norm to ``max_norm`` from the next step on; 0 turns clipping off. Every rank must pass the same number."""
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
) -> DeepSpeedDataLoader:
    """Return a loader of this rank's part of ``dataset``, in batches of ``batch_size`` (default: the micro-batch size).

    Args:
        engine: The engine.
        dataset: Map-style or iterable dataset.
        batch_size: Samples per batch and rank.
        route: "train" shuffles, "eval" and "predict" keep the order.
        pin_memory: Whether batches are page-locked, if there is an accelerator.
        data_sampler: Sampler to use instead of a ``DistributedSampler``.
        collate_fn: Collate function to use instead of the one given to ``initialize``.
        num_local_io_workers: Number of worker processes.
    """
    batch = batch_size if batch_size is not None else engine.resolved.batch.micro
    drop_last = engine.settings.dataloader_drop_last
    if data_sampler is None and hasattr(dataset, "__len__") and not isinstance(dataset, torch.utils.data.IterableDataset):
        axes = engine.collectives.topology
        data_sampler = torch.utils.data.DistributedSampler(
            dataset, axes.replicas, axes.replica, shuffle=route == "train", drop_last=drop_last
        )
    return DeepSpeedDataLoader(
        dataset,
        batch,
        pin_memory and engine.collectives.topology.device.type != "cpu",
        local_rank=0,
        tput_timer=None,  # the engine starts its own
        collate_fn=collate_fn or engine.collate_fn,
        num_local_io_workers=num_local_io_workers,
        data_sampler=data_sampler,
        dataloader_drop_last=drop_last,
    )


def offload_states(
    engine: ConfiguredEngine, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
) -> None:
    """Move state of an idle engine to host memory; local. Until ``reload_states`` the engine can neither train nor save.

    Forwards and ``GatheredParameters`` still work if the parameters are not moved: without "lp_params" and, in fp32, where the masters are
    the parameters, without "hp_params".

    On a machine without accelerator, and for state that the configuration offloads, there is nothing to move.

    Args:
        engine: The engine.
        include: ``OffloadStateTypeEnum`` members or their names; None is all kinds of state.
        device: Target: ``OffloadDeviceEnum.cpu``, "cpu" or "none" (nothing is moved).
        pin_memory: Whether the copies are in page-locked memory, which the engine keeps for the next call, until ``destroy``.
        non_blocking: Has no effect, because copies to page-locked memory are never waited for.

    Raises:
        ConfigError: A kind or the device is unknown.
        StateError: A forward or a backward is running, or a forward has run whose backward may still follow.
    """
    kinds = KINDS if include is None else tuple(getattr(kind, "value", kind) for kind in include)
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"offload_states(include=...): {kind!r} is not a kind of state; allowed are {', '.join(KINDS)}")
    where = str(getattr(device, "value", device))
    if where == "none":
        return
    if where != "cpu":
        raise ConfigError(f"offload_states(device={where!r}): the state of an idle engine can be moved to 'cpu' only")
    if not engine.runtime.idle:
        raise StateError(
            "offload_states() was called during a forward or backward, or between a forward and its backward. Call it after "
            "backward() and step(). Run forwards without a backward under torch.no_grad(), or delete their outputs"
        )
    if engine.collectives.topology.device.type == "cpu":
        warn_once("offload_states() moved nothing, because the state of the engine is in host memory already")
        return
    engine.offloaded_states.move(kinds, pin_memory)


def reload_states(engine: ConfiguredEngine, non_blocking: bool = False) -> None:
    """Move the state back that ``offload_states`` moved to the host; local. It does nothing if nothing was moved."""
    engine.offloaded_states.copy_back(non_blocking)
