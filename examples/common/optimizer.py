"""Optimizer and scheduler in the form that the launcher's choice asks for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from transformers import get_scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Under ZeRO-3 a parameter has shape [0], so biases and norms are told by name, never by their number of dims.
NO_DECAY = ("bias", "ln_", "layer_norm", "layernorm", "norm.")


def deepspeed_section(accelerator: Accelerator, name: str) -> Any:
    """Value of a top-level key of the DeepSpeed configuration; None when absent or when the launcher chose something else."""
    plugin = accelerator.state.deepspeed_plugin
    return None if plugin is None else plugin.deepspeed_config.get(name)


def parameter_groups(model: PreTrainedModel, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into those with and those without weight decay; empty groups are left out."""
    decay: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if any(mark in name.lower() for mark in NO_DECAY) else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: PreTrainedModel, accelerator: Accelerator, args: argparse.Namespace) -> Any:
    """AdamW, or a placeholder with our values when the DeepSpeed configuration holds the optimizer."""
    groups = parameter_groups(model, args.weight_decay)
    if deepspeed_section(accelerator, "optimizer") is None:
        return torch.optim.AdamW(groups, lr=args.learning_rate)
    from accelerate.utils import DummyOptim  # Accelerate offers it only where it finds DeepSpeed

    return DummyOptim(groups, lr=args.learning_rate, weight_decay=args.weight_decay)


def build_scheduler(optimizer: Any, accelerator: Accelerator, args: argparse.Namespace, max_train_steps: int) -> Any:
    """Scheduler by flag, or a placeholder when the DeepSpeed configuration holds the scheduler or the optimizer.

    Args:
        optimizer: Result of `build_optimizer`.
        accelerator: Tells who steps the scheduler.
        args: ``lr_scheduler_type`` and ``num_warmup_steps``.
        max_train_steps: Optimizer steps of the whole run.

    Returns:
        Something `Accelerator.prepare` accepts as scheduler.
    """
    # Accelerate moves a torch scheduler once per rank and step, and divides a placeholder's total by the number of ranks.
    ranks = accelerator.num_processes

    def by_flag(inner: torch.optim.Optimizer, steps_per_update: int) -> Any:
        warmup, total = args.num_warmup_steps * steps_per_update, max_train_steps * steps_per_update
        return get_scheduler(args.lr_scheduler_type, optimizer=inner, num_warmup_steps=warmup, num_training_steps=total)

    optimizer_in_config = deepspeed_section(accelerator, "optimizer") is not None
    scheduler_in_config = deepspeed_section(accelerator, "scheduler") is not None
    if not optimizer_in_config and not scheduler_in_config:
        return by_flag(optimizer, steps_per_update=ranks)
    from accelerate.utils import DummyScheduler

    if scheduler_in_config:
        return DummyScheduler(optimizer, total_num_steps=max_train_steps * ranks, warmup_num_steps=args.num_warmup_steps)
    return DummyScheduler(optimizer, lr_scheduler_callable=lambda inner: by_flag(inner, steps_per_update=1))
