"""Model, tokenizer, optimizer and scheduler of the example, in the form that the launcher's choice asks for."""

from __future__ import annotations

import argparse
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import torch
from accelerate import Accelerator
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, get_scheduler

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Shapes of the GPT-2 family as published; everything else is GPT2Config's default.
KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
}
SMALL_CONFIG: dict[str, Any] = {"n_layer": 4, "n_embd": 256, "n_head": 4}
# Under ZeRO-3 a parameter has shape [0], so biases and norms are told by name, never by their number of dims.
NO_DECAY = ("bias", "ln_", "layer_norm", "layernorm", "norm.")


def hub_is_reachable(timeout_s: float = 3.0) -> bool:
    """Whether the hub answers; the hub's own client would first retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    endpoint = urlparse(constants.ENDPOINT)
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def named_config(name: str, trust_remote_code: bool = False) -> tuple[PretrainedConfig, str]:
    """Load a configuration by path or hub name; the GPT-2 family also without network.

    Args:
        name: A folder, a hub name, or a key of ``KNOWN_CONFIGS``.
        trust_remote_code: Run code that comes with the configuration.

    Returns:
        The configuration, and one line for the user: empty, or why the published values were filled in.

    Raises:
        OSError: The name is not known here and cannot be loaded (transformers names it and says why).
    """
    if name in KNOWN_CONFIGS:
        try:
            return AutoConfig.from_pretrained(name, local_files_only=True), ""
        except OSError:
            if not hub_is_reachable():
                shape = ", ".join(f"{key}={value}" for key, value in KNOWN_CONFIGS[name].items())
                return GPT2Config(**KNOWN_CONFIGS[name]), f"{name}: the hub is out of reach, using its published shape ({shape})."
    return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code), ""


def build_config(args: argparse.Namespace) -> tuple[PretrainedConfig | None, str]:
    """Find the configuration that the flags ask for, size flags not yet applied.

    Returns:
        The configuration, or None when the flags name none, and one line for the user (see `named_config`).
    """
    name = args.config_name or args.model_name_or_path
    if name:
        return named_config(name, args.trust_remote_code)
    if args.model_type != "gpt2":
        return CONFIG_MAPPING[args.model_type](), ""
    return None, ""


def named_tokenizer(args: argparse.Namespace) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that the flags name, or return None when one has to be trained.

    Raises:
        OSError: The named tokenizer cannot be loaded; without a name the example trains one itself.
    """
    name = args.tokenizer_name or args.model_name_or_path
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(name, use_fast=not args.use_slow_tokenizer, trust_remote_code=args.trust_remote_code)
    except OSError as error:
        advice = "Give a local folder, or leave --tokenizer_name out: a tokenizer is then trained on the text."
        raise OSError(f"--tokenizer_name {name}: {error}\n{advice}") from error


def finish_config(config: PretrainedConfig | None, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> PretrainedConfig:
    """Apply the size flags and fit the configuration to the tokenizer.

    Args:
        config: Result of `build_config`; None makes a small GPT-2 with as many positions as a block has tokens.
        tokenizer: Its length bounds the vocabulary from below.
        args: ``n_layer``, ``n_embd``, ``n_head``, ``vocab_size``, ``block_size``.

    Returns:
        The configuration to build the model from.

    Raises:
        ValueError: A block is longer than the model has positions.
    """
    if config is None:
        config = GPT2Config(**SMALL_CONFIG, n_positions=args.block_size, vocab_size=len(tokenizer))
    for flag in ("n_layer", "n_embd", "n_head", "vocab_size"):
        value = getattr(args, flag)
        if value is not None:
            setattr(config, flag, value)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and args.block_size > positions:
        raise ValueError(
            f"--block_size {args.block_size}: the model has {positions} positions. Give a block of at most {positions} tokens."
        )
    if not args.model_name_or_path:
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    return config


def build_model(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> PreTrainedModel:
    """Build the model, pretrained or with random weights.

    Under ZeRO-3 transformers constructs it inside ``zero.Init``: no rank ever holds it whole.

    Args:
        config: Result of `finish_config`.
        tokenizer: A pretrained model's embedding grows to its length.
        args: ``model_name_or_path`` and ``trust_remote_code``.
    """
    if not args.model_name_or_path:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, config=config, trust_remote_code=args.trust_remote_code)
    if len(tokenizer) > config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    return model


def parameter_groups(model: PreTrainedModel, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into those with and those without weight decay; empty groups are left out."""
    decay: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if any(mark in name for mark in NO_DECAY) else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def deepspeed_section(accelerator: Accelerator, name: str) -> Any:
    """Value of a top-level key of the DeepSpeed configuration; None when absent or when the launcher chose something else."""
    plugin = accelerator.state.deepspeed_plugin
    return None if plugin is None else plugin.deepspeed_config.get(name)


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
