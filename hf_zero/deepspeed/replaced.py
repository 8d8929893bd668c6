"""Tell scripts that replace methods and values by which DeepSpeed trains that nothing here calls or reads them.

Scripts change DeepSpeed by assigning to its classes or objects: ``DeepSpeedZeroOptimizer.reduce_gradients = add_noise``. Under a name that
nothing here calls, such a function would silently have no effect. The names are from DeepSpeed 0.9 to 0.19. A replaced method that scripts
themselves call (``backward``, ``step``, ``save_checkpoint``) works as in any class, also ``optimizer.step``
(``core.optimizer.sharded.through_step``).
"""

from __future__ import annotations

from typing import Any

from hf_zero.errors import StateError
from hf_zero.observe import warn_once

_IN_CONFIGURATION = "write {} in the configuration that initialize() is given"

# Names that DeepSpeed's engine reads as it trains and this one does not, with the way to change what they say.
REMEDIES = {
    "train_batch_size": "call engine.set_train_batch_size(samples)",
    "gradient_accumulation_steps": "call engine.set_train_batch_size(samples)",
    "train_micro_batch_size_per_gpu": "call engine.set_train_micro_batch_size(samples)",
    "is_gradient_accumulation_boundary": "call engine.set_gradient_accumulation_boundary(is_boundary)",
    "gradient_clipping": "set engine.optimizer.clip_grad",
    "loss_scale": "set engine.optimizer.loss_scale",
    "gradient_average": _IN_CONFIGURATION.format('`gradient_allreduce_op` ("sum" is False)'),
    "enable_backward_allreduce": (
        "backward always reduces. Gradients of the script's own take the place of the engine's if it assigns them to param.grad before "
        "engine.step(), at stages 0 to 2"
    ),
    **{
        name: _IN_CONFIGURATION.format(f"`{key}`")
        for name, key in (
            ("communication_data_type", "communication_data_type"),
            ("gradient_predivide_factor", "gradient_predivide_factor"),
            ("postscale_gradients", "prescale_gradients"),
            ("zero_optimization_stage", "zero_optimization.stage"),
            ("_config", "a key"),
        )
    },
}

_GRADIENTS = "gradients are computed, reduced and applied by hf_zero.core: see `engine.optimizer.step`, hooks on parameters, and param.grad"
_BATCHES = "the stages of a pipeline follow a schedule of torch.distributed.pipelining"
_ENGINE = "initialize() makes model, optimizer and scheduler ready by itself: pass them as arguments"

# Methods that change gradients, updates or the model in DeepSpeed: an error, with the reason.
_CHANGES_TRAINING = {
    **dict.fromkeys(
        [
            "_backward_prologue",
            "_cast_inputs_half",
            "_forward_epilogue",
            "_forward_prologue",
            "_get_gradients_for_reduction",
            "_reduce_expert_gradients",
            "_reduce_non_expert_gradients",
            "_scale_loss_by_gas",
            "_take_model_step",
            "allreduce_and_copy",
            "allreduce_bucket",
            "allreduce_gradients",
            "allreduce_no_retain",
            "buffered_allreduce_fallback",
            "sparse_allreduce",
            "sparse_allreduce_bucket",
            "sparse_allreduce_no_retain",
            "_average_expert_grad_norms",
            "_optimizer_step",
            "_overflow_check_and_loss_scale_update",
            "_post_step",
            "_pre_step",
            "_update_scale",
            "allreduce_and_scatter",
            "average_tensor",
            "gradient_reduction_w_predivide",
            "independent_gradient_partition_epilogue",
            "overlapping_partition_gradients_reduce_epilogue",
            "partition_grads",
            "process_gradients",
            "reduce_gradients",
            "reduce_independent_p_g_buckets_and_remove_grads",
            "reduce_ipg_grads",
            "reduce_partition_and_remove_grads",
            "reduce_ready_partitions_and_remove_grads",
            "scale_if_loss",
            "unscale_and_clip_grads",
            "update_hp_grads",
            "update_lp_params",
        ],
        _GRADIENTS,
    ),
    **dict.fromkeys(
        [
            "_INSTRUCTION_MAP",
            "_exec_backward_pass",
            "_exec_forward_pass",
            "_exec_load_micro_batch",
            "_exec_optimizer_step",
            "_exec_reduce_grads",
            "_exec_reduce_tied_grads",
            "_exec_schedule",
        ],
        _BATCHES,
    ),
    **dict.fromkeys(
        [
            "_configure_basic_optimizer",
            "_configure_bf16_optimizer",
            "_configure_distributed_model",
            "_configure_fp16_optimizer",
            "_configure_lr_scheduler",
            "_configure_optimizer",
            "_configure_zero_optimizer",
        ],
        _ENGINE,
    ),
}

# Methods that check, report, save or measure in DeepSpeed, or that send the values that ranks have alike here: a warning.
_ONLY_TOLD = frozenset(
    [
        "_broadcast_model",
        "_change_recovery_script_permissions",
        "_check_for_duplicates",
        "_configure_checkpointing",
        "_copy_recovery_script",
        "_do_args_sanity_check",
        "_do_optimizer_sanity_check",
        "_do_sanity_check",
        "_get_ckpt_name",
        "_get_zero_ckpt_name",
        "_load_checkpoint",
        "_load_zero_checkpoint",
        "_report_progress",
        "_save_checkpoint",
        "_save_moe_checkpoint",
        "_save_zero_checkpoint",
        "_write_monitor",
        "clip_fp32_gradients",
        "load_moe_state_dict",
        "_constant_buffered_norm2",
        "_has_inf_or_nan",
        "complete_grad_norm_calculation_for_cpu_offload",
        "get_grad_norm_direct",
        "has_overflow",
        "initialize_optimizer_states",
        "_recv_tensor_meta",
        "_send_tensor_meta",
    ]
)


# Steps of DeepSpeed's save_checkpoint and load_checkpoint that scripts call one by one (SwissArmyTransformer, for the weights alone).
_STEPS_OF_CHECKPOINTS = frozenset(
    [
        "_create_checkpoint_file",
        "_create_zero_checkpoint_files",
        "_get_all_ckpt_names",
        "_get_ckpt_name",
        "_get_zero_ckpt_name",
        "_load_checkpoint",
        "_load_zero_checkpoint",
        "_save_checkpoint",
        "_save_zero_checkpoint",
    ]
)


def missing_step(name: str) -> AttributeError | None:
    """Return the error for a step of DeepSpeed's checkpoints that a script reads from an engine; None for other names."""
    if name not in _STEPS_OF_CHECKPOINTS:
        return None
    return AttributeError(
        f"engine.{name} is a step of DeepSpeed's own save_checkpoint and load_checkpoint, which this engine does not have. Call, on "
        "all ranks: engine.save_checkpoint(folder, tag, client_state=...) and engine.load_checkpoint(folder); "
        "engine.save_16bit_model(folder) writes the weights alone"
    )


def report(name: str, value: Any, holder: str, method: bool = False) -> None:
    """Report that a script has set ``name`` of ``holder`` to ``value``, if that would change DeepSpeed and does nothing here.

    With ``method``, only inner methods count: the engine's optimizer accepts values under names that the engine refuses.

    Raises:
        StateError: The name changes gradients, updates, batches or the model in DeepSpeed.
    """
    if name in REMEDIES and not method:
        raise StateError(
            f"{holder}.{name} was assigned {_described(value)}, but the engine does not read it, so nothing would change: {REMEDIES[name]}"
        )
    if name in _CHANGES_TRAINING:
        raise StateError(
            f"{holder}.{name} was replaced by {_described(value)}, but nothing here calls it, so training would go on without it: "
            f"{_CHANGES_TRAINING[name]}"
        )
    if name in _ONLY_TOLD:
        warn_once(f"{holder}.{name} was replaced by {_described(value)}; nothing here calls it, so it has no effect")


class Watched:
    """Classes that scripts change, and their names as they were made.

    Args:
        classes: The classes, complete.
    """

    def __init__(self, *classes: type) -> None:
        self._made = {one: dict(vars(one)) for one in classes}

    def report(self) -> None:
        """Report names that a script has set on the classes; local.

        Raises:
            StateError: As for ``report``.
        """
        for one, made in self._made.items():
            for name in (REMEDIES.keys() | _CHANGES_TRAINING.keys() | _ONLY_TOLD) & vars(one).keys():
                if vars(one)[name] is not made.get(name):
                    report(name, vars(one)[name], one.__name__)


def _described(value: Any) -> str:
    """Return the qualified name of a function, else the representation of ``value``."""
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if name is not None else repr(value)[:80]
