"""Attach the integrations to all engines that ``hf_zero.initialize`` makes; importing this module is enough.

A Trainer that trains a second time gets its plain model back when its engine is destroyed ([Note: training again]).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from hf_zero.activation_checkpointing.recompute import checkpoint_on_host
from hf_zero.assembly import mesh
from hf_zero.config.read import read_config
from hf_zero.core import engine
from hf_zero.core.engine import Engine
from hf_zero.core.units import guards
from hf_zero.deepspeed import held_weights
from hf_zero.deepspeed.initialize import initialize
from hf_zero.expert_parallel import apply
from hf_zero.integrations import callers, methods
from hf_zero.integrations.expert_saves import gathered_value
from hf_zero.integrations.experts import dispatch_in_table
from hf_zero.integrations.metrics import count_samples_once
from hf_zero.integrations.parallelism import claims_of_accelerate, require_divided
from hf_zero.integrations.preemption import listen_if_configured, save_by_itself
from hf_zero.integrations.saves import keeps_too_few, wrap_saves, writes_on_its_node
from hf_zero.integrations.trainer_snapshots import note_accelerator, schedulers_of
from hf_zero.integrations.typed_values import config_of_launcher

_CHECKPOINTS_WITH = "_gradient_checkpointing_func"  # attribute of a layer: the function that checkpoints its forward
_OFFLOADING = "_activation_checkpointing_enable.<locals>.checkpoint_func"
# Keys of `zero_optimization` that accelerate's plugin fills when it is made, and no later call.
_FILLED_ONCE = ("stage", "device", "nvme_path", "stage3_gather_16bit_weights_on_model_save")


def serve_offload(built: Engine) -> None:
    """Offload checkpointed inputs with the engine's hooks if ``gradient_checkpointing_kwargs`` has ``offload``.

    transformers (5.17 and later) wraps each checkpointed call in ``torch.autograd.graph.save_on_cpu``, which copies in the computing
    stream and fails without an accelerator. No hook of a module runs between this wrapper and the call. So this function replaces each
    layer's checkpointing function by one that does the same with the engine's hooks.
    """
    for module in built.module.modules():
        function = module.__dict__.get(_CHECKPOINTS_WITH)
        if isinstance(function, partial) and getattr(function.func, "__qualname__", "").endswith(_OFFLOADING):
            moving = partial(checkpoint_on_host, built.runtime.saved.host)
            setattr(module, _CHECKPOINTS_WITH, partial(moving, *function.args, **function.keywords))


def count_steps_of_groups(built: Engine) -> None:
    """Let a running Trainer count the optimizer steps of the run if its engine trains together with other replica groups.

    A group that comes back begins its training from the first step, and gets the state after a later one.
    """
    if built.stepper is None or built.stepper.groups is None:
        return
    from transformers import TrainerCallback

    class CountOfRun(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not built.destroyed:
                state.global_step = built.progress.global_steps

    for call in callers.running(methods.TRAIN):
        call.caller.callback_handler.callbacks.insert(0, CountOfRun())  # before the one that ends the training


def keep_own_buffers(built: Engine) -> None:
    """Let each rank keep its own buffers if the script has asked DistributedDataParallel for it, with ``ddp_broadcast_buffers=False`` of
    Trainer's arguments or ``DistributedDataParallelKwargs(broadcast_buffers=False)``.
    """
    for call in callers.running(methods.PREPARE):
        handler = getattr(call.caller, "ddp_handler", None)
        if built.stepper is not None and handler is not None and not getattr(handler, "broadcast_buffers", True):
            built.stepper.buffers.kept = True


def restore_plain_model(destroyed: Engine) -> None:
    """Restore the plain model of a Trainer when its engine is destroyed.

    [Note: training again] ``Trainer.train()`` begins with ``accelerator.free_memory()``, which destroys the engine of the previous training
    (or evaluation at stage 3). It then uses ``trainer.model_wrapped``, the same engine, as if it were prepared. So a Trainer that destroys
    its engine gets its plain model back, and prepares it like the first time. The "auto" values of the configuration must be filled
    again too: an evaluation has set the number of steps to 0 and deleted the optimizer's section, and the arguments may have changed.

    Called when an engine is destroyed.
    """
    for call in callers.running(methods.TRAIN):
        trainer = call.caller
        if trainer.model is destroyed.module and trainer.model_wrapped is destroyed:
            trainer.model_wrapped = destroyed.module
            _fill_again(trainer)


def _fill_again(trainer: Any) -> None:
    source = getattr(trainer.args, "deepspeed", None) or config_of_launcher()
    if not source:
        return
    written = read_config(source)
    holder = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    for section in ("optimizer", "scheduler"):
        if section in written:
            holder.config[section] = written[section]
    for path in _autos(written):
        if path[0] == "zero_optimization" and path[-1] in _FILLED_ONCE:
            continue
        node = holder.config
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = "auto"
    if not trainer.args.auto_find_batch_size:  # with it Trainer fills the values itself, with the smaller batch
        holder.trainer_config_process(trainer.args)


def _autos(node: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in node.items():
        if value == "auto":
            yield (name,)
        elif isinstance(value, Mapping):
            yield from ((name, *rest) for rest in _autos(value))


__all__ = ["initialize"]

engine.on_build += [require_divided, wrap_saves, count_samples_once, listen_if_configured, serve_offload]
engine.on_build += [note_accelerator, count_steps_of_groups, keep_own_buffers]
engine.on_preempted.append(save_by_itself)
engine.on_destroy.append(restore_plain_model)
engine.reasons_to_wait.append(keeps_too_few)
engine.rewound_with_engine.append(schedulers_of)
held_weights.wanted_here.append(writes_on_its_node)
guards.gathered_values.append(gathered_value)
mesh.sources.append(claims_of_accelerate)
apply.tables.append(dispatch_in_table)
