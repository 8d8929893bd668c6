"""Load the text of the language modelling examples and cut it into blocks of equal length."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from flags import FlagError
from offline import END_OF_TEXT, first_samples, from_columns, load_files, load_hub_dataset, split_items, standard_library_text

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedTokenizerBase


def load_raw_datasets(args: argparse.Namespace) -> DatasetDict:
    """Load training and validation text from the hub or from files; without either flag, from Python's standard library.

    Args:
        args: The data flags of `arguments.parse_arguments`.

    Returns:
        Splits ``train`` and ``validation``; the text is in the column ``text``, or else in the first column.
    """
    if args.dataset_name:
        return load_hub_dataset(args, *filter(None, (args.dataset_name, args.dataset_config_name)))
    if args.train_file:
        linebreaks = {"keep_linebreaks": not args.no_keep_linebreaks} if args.train_file.endswith(".txt") else {}
        return load_files(args, **linebreaks)
    train, validation = split_items(standard_library_text(end_of_text=END_OF_TEXT), args.validation_split_percentage)
    return from_columns({"text": train}, {"text": validation})


def text_column(raw: DatasetDict) -> str:
    """Return the name of the text column: ``text``, or else the first column."""
    columns = raw["train"].column_names
    return "text" if "text" in columns else str(columns[0])


def group_into_blocks(examples: dict[str, list[list[int]]], block_size: int) -> dict[str, list[list[int]]]:
    """Join token lists and cut them into blocks of equal length; a remainder shorter than a block is dropped.

    Args:
        examples: One list of token ids per document and column.
        block_size: Tokens per block.

    Returns:
        The same columns cut into blocks, and ``labels``, equal to ``input_ids`` (the model shifts them).
    """
    joined = {name: [token for document in column for token in document] for name, column in examples.items()}
    whole = len(joined["input_ids"]) // block_size * block_size
    blocks = {name: [tokens[start : start + block_size] for start in range(0, whole, block_size)] for name, tokens in joined.items()}
    blocks["labels"] = [list(block) for block in blocks["input_ids"]]
    return blocks


def make_blocks(raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Tokenize both splits and cut them into blocks.

    Args:
        raw: Result of `load_raw_datasets`.
        tokenizer: Any Hugging Face tokenizer.
        args: ``block_size``, ``max_*_samples``.

    Returns:
        Training and validation sequences with columns ``input_ids``, ``attention_mask``, ``labels``.

    Raises:
        FlagError: The text of a split is shorter than one block.
    """
    column = text_column(raw)

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch[column], return_token_type_ids=False)

    tokenized = raw.map(tokenize, batched=True, remove_columns=raw["train"].column_names, desc="Tokenize")
    grouped = tokenized.map(group_into_blocks, batched=True, fn_kwargs={"block_size": args.block_size}, desc="Cut into blocks")
    splits = []
    for split, limit in (("train", args.max_train_samples), ("validation", args.max_eval_samples)):
        if len(grouped[split]) == 0:
            raise FlagError(
                f"The {split} text is shorter than one block of {args.block_size} tokens: lower --block_size or give more text."
            )
        splits.append(first_samples(grouped[split], limit))
    return splits[0], splits[1]


def mask_blocks(blocks: Dataset, tokenizer: PreTrainedTokenizerBase, probability: float, seed: int) -> Dataset:
    """Hide tokens for a masked language model once, before training, as in BERT's own training data.

    Args:
        blocks: Sequences from `make_blocks`.
        tokenizer: Tokenizer with a mask token.
        probability: Share of tokens to predict; 80 % of them are masked, 10 % replaced by random tokens, 10 % unchanged.
        seed: The same seed hides the same tokens.

    Returns:
        The sequences with hidden tokens; ``labels`` is -100 for tokens that the model does not predict.
    """
    from transformers import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability, seed=seed)

    def mask(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        hidden = collator([{"input_ids": tokens} for tokens in batch["input_ids"]])
        return {"input_ids": hidden["input_ids"].tolist(), "labels": hidden["labels"].tolist()}

    return blocks.map(mask, batched=True, desc="Mask", keep_in_memory=True)
