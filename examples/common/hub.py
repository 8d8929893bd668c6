"""The hub, and what serves where it is out of reach: published shapes of the experiments' models."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from common.arguments import FlagError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Published shapes; what is not named is the default of the configuration class of the model type.
_BLENDERBOT_400M = {
    "model_type": "blenderbot",
    "vocab_size": 8008,
    "d_model": 1280,
    "encoder_layers": 2,
    "decoder_layers": 12,
    "encoder_attention_heads": 32,
    "decoder_attention_heads": 32,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "max_position_embeddings": 128,
    "scale_embedding": True,
}
_DEBERTA_V2 = {
    "model_type": "deberta-v2",
    "vocab_size": 128100,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "max_relative_positions": -1,
    "type_vocab_size": 0,
}
GLUE = "nyu-mll/glue"  # the dataset behind --task_name
KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {"model_type": "gpt2", "n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {"model_type": "gpt2", "n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25},
    "bert-base-uncased": {"model_type": "bert"},
    "bert-large-uncased": {
        "model_type": "bert",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "microsoft/deberta-v2-xlarge-mnli": _DEBERTA_V2
    | {
        "num_hidden_layers": 24,
        "hidden_size": 1536,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
        "attention_head_size": 64,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
    },
    "facebook/blenderbot-400M-distill": _BLENDERBOT_400M,
}


def is_reachable(timeout_s: float = 3.0) -> bool:
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


def known_config(name: str) -> PretrainedConfig:
    """Configuration of a model in ``KNOWN_SHAPES``, without network."""
    from transformers import CONFIG_MAPPING

    shape = dict(KNOWN_SHAPES[name])
    return CONFIG_MAPPING[shape.pop("model_type")](**shape)


def named_config(name: str, trust_remote_code: bool = False) -> tuple[PretrainedConfig, str]:
    """Load a configuration by path or hub name; those of ``KNOWN_SHAPES`` also without network.

    Args:
        name: A folder, a hub name, or a key of ``KNOWN_SHAPES``.
        trust_remote_code: Run code that comes with the configuration.

    Returns:
        The configuration, and one line for the user: empty, or why the published values were filled in.

    Raises:
        FlagError: The name is not known here and cannot be loaded.
    """
    from transformers import AutoConfig

    if name in KNOWN_SHAPES and not Path(name).is_dir():
        try:
            return AutoConfig.from_pretrained(name, local_files_only=True), ""
        except OSError:
            if not is_reachable():
                shape = ", ".join(f"{key}={value}" for key, value in KNOWN_SHAPES[name].items())
                return known_config(name), f"{name}: the hub is out of reach, using its published shape ({shape})."
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code), ""
    except OSError as error:
        known = ", ".join(KNOWN_SHAPES)
        raise FlagError(f"No configuration {name}: {error}\nGive a local folder, or one that is built in: {known}.") from error


def check_offline(args: Any, *names: str) -> str:
    """Settle before anything is loaded whether the flags need the hub: refuse at once, or replace what cannot be had.

    Args:
        args: Parsed flags. With ``offline`` the flags of ``names`` and ``model_name_or_path`` are emptied in place; the model's shape
            is kept as ``config_name`` where it is known here.
        *names: Flags that name something on the hub besides the model: a dataset, a tokenizer.

    Returns:
        One line for the user about what was replaced; empty when nothing was.

    Raises:
        FlagError: Something named is neither here nor in the cache, the hub does not answer, and there is no ``--offline``.
    """
    wanted = {name: getattr(args, name) for name in ("model_name_or_path", *names)}
    remote = {name: value for name, value in wanted.items() if value and not Path(value).exists()}
    if not remote:
        return ""
    listed = ", ".join(f"--{name} {value}" for name, value in remote.items())
    if not args.offline:
        if is_reachable() or all(_is_cached(name, value) for name, value in remote.items()):
            return ""
        raise FlagError(
            f"The hub is out of reach, and {listed} can be had nowhere else. Give local folders and files instead, or add --offline: "
            "random weights of the model's published shape and a task made from Python's own docstrings then stand in for them."
        )
    model = remote.get("model_name_or_path")
    if model in KNOWN_SHAPES:
        args.config_name = args.config_name or model
    for name in remote:
        setattr(args, name, None)
    shape = f"random weights of the shape of {args.config_name}" if model and args.config_name else "a small model with random weights"
    return f"--offline: in place of {listed}: {shape if model else 'the model as named'}, data and tokenizer from Python's own docstrings."


def _is_cached(flag: str, name: str) -> bool:
    """Whether this machine's caches hold the model or dataset."""
    from huggingface_hub import try_to_load_from_cache

    if flag not in ("dataset_name", "task_name"):
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    from datasets import config

    name = GLUE if flag == "task_name" else name
    return Path(config.HF_DATASETS_CACHE, name.replace("/", "___")).is_dir()


def push_folder(folder: Path, repo_name: str | None, token: str | None) -> str:
    """Upload a run's folder, checkpoints and caches left out.

    Args:
        folder: The output folder.
        repo_name: Repository to upload to; None takes the folder's name.
        token: Access token; None takes the stored one.

    Returns:
        The repository's full name.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo = api.create_repo(repo_name or folder.name, exist_ok=True).repo_id
    api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=["step_*", "epoch_*", "checkpoint-*", "wandb/*", "*.partial"])
    return repo
