"""Build the sequence-to-sequence model: a named one, or a small BlenderBot with random weights."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from flags import FlagError
from offline import known_config, named_config
from transformers import AutoModelForSeq2SeqLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PUBLISHED = "facebook/blenderbot-400M-distill"  # the small model has this model's architecture
SMALL_SHAPE: dict[str, Any] = {"d_model": 128, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 4}
SIZE_FLAGS = ("d_model", "encoder_layers", "decoder_layers", "num_attention_heads", "vocab_size")
BOTH_SIDES = {"num_attention_heads": ("encoder_attention_heads", "decoder_attention_heads")}


def build_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[PretrainedConfig, str]:
    """Return the configuration that the flags describe, adapted to the tokenizer.

    Args:
        args: The model flags and the lengths.
        tokenizer: Tokenizer of the model; the vocabulary gets at least its length.

    Returns:
        The configuration, and one line for the user (see `offline.named_config`).

    Raises:
        FlagError: A source or target has more tokens than the model has positions.
    """
    name, note = args.config_name or args.model_name_or_path, ""
    longest = max(args.max_source_length, args.max_target_length, args.val_max_target_length)
    if name:
        config, note = named_config(name)
    else:
        config = known_config(PUBLISHED)
        set_sizes(config, SMALL_SHAPE | {"vocab_size": len(tokenizer), "max_position_embeddings": longest})
    set_sizes(config, {flag: getattr(args, flag) for flag in SIZE_FLAGS if getattr(args, flag) is not None})
    if args.d_model or not name:
        config.encoder_ffn_dim = config.decoder_ffn_dim = 4 * config.d_model
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise FlagError(f"--max_source_length, --max_target_length, --val_max_target_length: at most {positions}, the model's positions.")
    if not args.model_name_or_path:
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
        config.bos_token_id = config.decoder_start_token_id = tokenizer.bos_token_id
        config.forced_eos_token_id = tokenizer.eos_token_id
    return config, note


def set_sizes(config: PretrainedConfig, sizes: dict[str, int]) -> None:
    """Set sizes of the configuration in place; encoder and decoder get the same number of attention heads."""
    for key, value in sizes.items():
        for name in BOTH_SIDES.get(key, (key,)):
            setattr(config, name, value)


def build_model(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> PreTrainedModel:
    """Build the model, pretrained or with random weights; under ZeRO stage 3, inside ``zero.Init``."""
    if not args.model_name_or_path:
        return AutoModelForSeq2SeqLM.from_config(config)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path, config=config)
    if len(tokenizer) > config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    return model
