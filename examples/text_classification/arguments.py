"""Define the command line of the text classification example: the flags of the Hugging Face script of the same name, and a few more."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from data import GLUE_COLUMNS
from flags import (
    Parser,
    add_hub_flags,
    add_name_flags,
    add_output_flags,
    add_split_flag,
    add_switch,
    add_training_flags,
    check_at_least,
    check_files,
    check_run,
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Args:
        argv: Arguments after the program's name; None reads ``sys.argv``.

    Returns:
        One attribute per flag, names as on the command line.

    Raises:
        SystemExit: A flag is unknown, or two flags contradict each other; argparse prints the flags and the usage.
    """
    parser = Parser(
        description=(
            "Train a text classifier with Accelerate. The launcher file selects one process, DDP or ZeRO 0-3. "
            "With neither --task_name nor --train_file it needs no network: it learns which summary belongs to which function, "
            "from the docstrings of the installed Python."
        )
    )
    add_data_flags(parser)
    add_model_flags(parser)
    add_training_flags(parser)
    add_output_flags(parser, report_name="cls_no_trainer")
    args = parser.parse_args(argv)
    check_data(parser, args)
    check_run(parser, args)
    return args


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of the data."""
    group = parser.add_argument_group("data")
    group.add_argument("--task_name", choices=sorted(GLUE_COLUMNS), help="GLUE task on the hub; those with two classes.")
    group.add_argument("--train_file", help="A .csv or .json file with the columns sentence1, sentence2 (may be missing) and label.")
    group.add_argument("--validation_file", help="The same to evaluate on.")
    add_split_flag(group, 10)
    group.add_argument("--max_length", type=int, default=128, help="Largest number of tokens of a pair of sentences (default 128).")
    add_switch(group, "--pad_to_max_length", "Pad every sample to --max_length; otherwise to the longest of its batch.")
    group.add_argument("--max_train_samples", type=int, help="Keep only the first N training samples.")
    group.add_argument("--max_eval_samples", type=int, help="Keep only the first N evaluation samples.")
    add_hub_flags(group)
    parser.set_defaults(dataset_name=None)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of model and tokenizer."""
    group = parser.add_argument_group("model")
    add_name_flags(group, "microsoft/deberta-v2-xlarge-mnli")
    add_switch(group, "--ignore_mismatched_sizes", "Replace a pretrained head that has another number of classes.")
    group.add_argument("--num_hidden_layers", type=int, help="Number of blocks; overrides the configuration (2 when none is named).")
    group.add_argument("--hidden_size", type=int, help="Width; overrides the configuration (128 when none is named).")
    group.add_argument("--num_attention_heads", type=int, help="Attention heads; overrides the configuration (4 when none is named).")


def check_data(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Raise a command-line error for invalid data flags."""
    if args.task_name and args.train_file:
        parser.error(f"--task_name {args.task_name} and --train_file {args.train_file} are two sources of text; give only one.")
    check_files(parser, args, ("csv", "json"))
    check_at_least(parser, args, 8, "max_length")
    check_at_least(parser, args, 1, "max_train_samples", "max_eval_samples")
    check_at_least(parser, args, 1, "num_hidden_layers", "hidden_size", "num_attention_heads")
