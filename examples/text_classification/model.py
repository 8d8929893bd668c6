"""Build the classifier: a named model, or a small DeBERTa-v2 with random weights."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from flags import FlagError
from offline import known_config, named_config
from transformers import AutoModelForSequenceClassification

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PUBLISHED = "microsoft/deberta-v2-xlarge-mnli"  # the small model has this model's architecture
SMALL_SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4}
SIZE_FLAGS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def build_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, labels: list[str]) -> tuple[PretrainedConfig, str]:
    """Return the configuration that the flags describe, adapted to tokenizer and classes.

    Args:
        args: The model flags.
        tokenizer: Tokenizer of the model; the vocabulary gets at least its length.
        labels: Names of the classes.

    Returns:
        The configuration, and one line for the user (see `offline.named_config`).

    Raises:
        FlagError: The number of attention heads does not divide the width.
    """
    name, note = args.config_name or args.model_name_or_path, ""
    if name:
        config, note = named_config(name)
    else:
        config = known_config(PUBLISHED)
        for key, value in SMALL_SHAPE.items():
            setattr(config, key, value)
        config.vocab_size, config.max_position_embeddings = len(tokenizer), args.max_length
    for flag in SIZE_FLAGS:
        if getattr(args, flag) is not None:
            setattr(config, flag, getattr(args, flag))
    if config.hidden_size % config.num_attention_heads:
        raise FlagError(f"--num_attention_heads {config.num_attention_heads} does not divide the width {config.hidden_size}.")
    if args.hidden_size or not name:
        config.intermediate_size = 4 * config.hidden_size
        config.pooler_hidden_size = config.hidden_size
        config.attention_head_size = config.hidden_size // config.num_attention_heads
    if not args.model_name_or_path:
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        config.pad_token_id = tokenizer.pad_token_id
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    return config, note


def build_model(config: PretrainedConfig, args: argparse.Namespace) -> PreTrainedModel:
    """Build the model, pretrained or with random weights; under ZeRO stage 3, inside ``zero.Init``."""
    if not args.model_name_or_path:
        return AutoModelForSequenceClassification.from_config(config)
    return AutoModelForSequenceClassification.from_pretrained(
        args.model_name_or_path,
        config=config,
        ignore_mismatched_sizes=args.ignore_mismatched_sizes,
    )
