"""Build the language model of the examples: a named one, or a small one with random weights."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from flags import FlagError
from offline import named_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SMALL_TYPES = ("bert", "gpt2", "llama")  # types of which the example can make a small model
SMALL_SHAPE: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
# Names of the size flags in configurations; GPT-2 has both names.
SIZE_FLAGS = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads", "vocab_size": "vocab_size"}


def build_config(args: argparse.Namespace) -> tuple[PretrainedConfig | None, str]:
    """Return the configuration that the flags name, before the size flags are applied.

    Returns:
        The configuration (None if the flags name none), and one line for the user (see `offline.named_config`).
    """
    name = args.config_name or args.model_name_or_path
    if name:
        return named_config(name)
    if args.model_type not in SMALL_TYPES:
        return CONFIG_MAPPING[args.model_type](), ""
    return None, ""


def finish_config(config: PretrainedConfig | None, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> PretrainedConfig:
    """Apply the size flags and fit the configuration to the tokenizer.

    Args:
        config: Result of `build_config`; None makes a small model with one position per token of a block.
        tokenizer: Tokenizer of the model; the vocabulary gets at least its length.
        args: ``n_layer``, ``n_embd``, ``n_head``, ``vocab_size``, ``block_size``.

    Returns:
        The configuration to build the model from.

    Raises:
        FlagError: A block has more tokens than the model has positions.
    """
    if config is None:
        config = CONFIG_MAPPING[args.model_type](**SMALL_SHAPE, max_position_embeddings=args.block_size, vocab_size=len(tokenizer))
    for flag, name in SIZE_FLAGS.items():
        value = getattr(args, flag)
        if value is not None:
            setattr(config, name, value)
    if args.n_head is not None and getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = args.n_head
    if hasattr(config, "intermediate_size") and (args.n_embd is not None or not (args.config_name or args.model_name_or_path)):
        config.intermediate_size = 4 * config.hidden_size
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and args.block_size > positions:
        raise FlagError(f"--block_size {args.block_size}: the model has {positions} positions. Give a block of at most {positions} tokens.")
    if not args.model_name_or_path:
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        if tokenizer.pad_token_id is not None:
            config.pad_token_id = tokenizer.pad_token_id
    return config


def build_model(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace, *, masked: bool = False
) -> PreTrainedModel:
    """Build the model, pretrained or with random weights.

    Under ZeRO stage 3 transformers constructs it inside ``zero.Init``, so that each rank creates only its shards.

    Args:
        config: Result of `finish_config`.
        tokenizer: Tokenizer of the model; a pretrained model's embedding is enlarged to its length.
        args: ``model_name_or_path``.
        masked: Build a masked language model instead of a causal one.
    """
    family = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    if not args.model_name_or_path:
        return family.from_config(config)
    model = family.from_pretrained(args.model_name_or_path, config=config)
    if len(tokenizer) > config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    return model
