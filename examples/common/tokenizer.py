"""Tokenizers trained on the spot: byte-level BPE, so that nothing has to be downloaded."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from common.arguments import FlagError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 4096
# Roles of special tokens by kind of model, in the order of their ids. No passwords (B105), though "token" is in the names.
DECODER_TOKENS = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
ENCODER_TOKENS = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "mask_token": "[MASK]"}  # nosec B105
SEQ2SEQ_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # nosec B105


def train_tokenizer(texts: Iterable[str], vocab_size: int, special_tokens: Mapping[str, str] = DECODER_TOKENS) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer on ``texts``.

    Args:
        texts: Documents to learn the merges from.
        vocab_size: Entries including 256 bytes and the special tokens; small texts may give fewer.
        special_tokens: Role to token. With ``cls_token`` and ``sep_token`` a text becomes ``[CLS] a [SEP] b [SEP]``;
            with ``bos_token`` and another ``eos_token`` it ends with the latter; otherwise nothing is added.

    Raises:
        FlagError: ``vocab_size`` leaves no room for the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = list(dict.fromkeys(special_tokens.values()))
    needed = 256 + len(specials)
    if vocab_size < needed:
        raise FlagError(
            f"--vocab_size {vocab_size}: a byte-level tokenizer needs at least {needed} entries (256 bytes and {', '.join(specials)})."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    template = _template(special_tokens, specials)
    if template is not None:
        tokenizer.post_processor = template
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special_tokens)


def cached_tokenizer(
    texts: list[str], vocab_size: int, cache_dir: Path | None, special_tokens: Mapping[str, str] = DECODER_TOKENS
) -> PreTrainedTokenizerBase:
    """Train a tokenizer, or load the one trained before on the same text, size and special tokens.

    Args:
        texts: Documents to learn from.
        vocab_size: Wanted number of entries.
        cache_dir: Folder of the cache; None trains anew.
        special_tokens: See `train_tokenizer`.
    """
    from transformers import PreTrainedTokenizerFast

    if cache_dir is None:
        return train_tokenizer(texts, vocab_size, special_tokens)
    digest = hashlib.sha256("".join([*texts, json.dumps(dict(special_tokens))]).encode()).hexdigest()[:12]
    path = cache_dir / f"tokenizer-{vocab_size}-{digest}"
    if not path.exists():
        partial = path.with_name(path.name + ".partial")
        train_tokenizer(texts, vocab_size, special_tokens).save_pretrained(partial)
        partial.rename(path)  # a run that is stopped midway must not leave half a tokenizer for the next one
    return PreTrainedTokenizerFast.from_pretrained(path)


def _template(special_tokens: Mapping[str, str], specials: list[str]) -> object | None:
    """Post-processor that puts the special tokens around a text or a pair of texts; None adds nothing."""
    from tokenizers import processors

    ids = [(token, index) for index, token in enumerate(specials)]
    if "cls_token" in special_tokens:
        start, end = special_tokens["cls_token"], special_tokens["sep_token"]
        return processors.TemplateProcessing(single=f"{start} $A {end}", pair=f"{start} $A {end} $B:1 {end}:1", special_tokens=ids)
    end = special_tokens["eos_token"]
    if end == special_tokens["bos_token"]:
        return None
    return processors.TemplateProcessing(single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=ids)


def build_tokenizer(
    args: argparse.Namespace, texts: Callable[[], list[str]], special_tokens: Mapping[str, str] = DECODER_TOKENS
) -> PreTrainedTokenizerBase:
    """The tokenizer that the flags name, or one trained on the text and kept in ``output_dir``.

    Args:
        args: The model flags and ``output_dir``.
        texts: Gives the documents to learn from.
        special_tokens: See `train_tokenizer`.
    """
    tokenizer = named_tokenizer(args)
    if tokenizer is not None:
        return tokenizer
    cache_dir = Path(args.output_dir) if args.output_dir else None
    return cached_tokenizer(texts(), args.vocab_size or DEFAULT_VOCAB_SIZE, cache_dir, special_tokens)


def named_tokenizer(args: argparse.Namespace) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that the flags name, or return None when one has to be trained.

    Raises:
        FlagError: The named tokenizer cannot be loaded; without a name the example trains one itself.
    """
    from transformers import AutoTokenizer

    name = args.tokenizer_name or args.model_name_or_path
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(name, use_fast=not args.use_slow_tokenizer, trust_remote_code=args.trust_remote_code)
    except OSError as error:
        flag = "--tokenizer_name" if args.tokenizer_name else "--model_name_or_path"
        advice = "Give a local folder with a tokenizer, or leave the flag out: a tokenizer is then trained on the text."
        raise FlagError(f"{flag} {name}: {error}\n{advice}") from error
