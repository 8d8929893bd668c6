"""Define the command line of the sequence-to-sequence example: the flags of the published chatbot experiment, and a few more."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

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
    to_bool,
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
            "Train a sequence-to-sequence model with Accelerate. The launcher file selects one process, DDP or ZeRO 0-3. "
            "With neither --dataset_name nor --train_file it needs no network: it learns to say what a function does, "
            "from the docstrings of the installed Python."
        )
    )
    add_data_flags(parser)
    add_generation_flags(parser)
    add_model_flags(parser)
    add_training_flags(parser, epochs=1)
    add_output_flags(parser, report_name="seq2seq_no_trainer")
    args = parser.parse_args(argv)
    check_data(parser, args)
    check_run(parser, args)
    return args


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of the data: its source and the lengths of samples."""
    group = parser.add_argument_group("data")
    group.add_argument("--dataset_name", help="Name of a dataset on the hub, e.g. smangrul/MuDoConv.")
    group.add_argument("--dataset_config_name", help="Its configuration.")
    group.add_argument("--train_file", help="A .csv or .json file to train on.")
    group.add_argument("--validation_file", help="A .csv or .json file to evaluate on.")
    add_split_flag(group, 10)
    group.add_argument("--text_column", help="Column with the sources (default: the first).")
    group.add_argument("--summary_column", help="Column with the targets (default: the second).")
    group.add_argument("--source_prefix", default="", help="Text in front of every source, e.g. 'chatbot: '.")
    group.add_argument("--max_source_length", type=int, default=128, help="Largest number of tokens of a source (default 128).")
    group.add_argument("--max_target_length", type=int, default=64, help="Largest number of tokens of a target in training (default 64).")
    group.add_argument("--n_train", type=int, help="Use only the first N training samples (default: all).")
    group.add_argument("--n_val", type=int, help="Use only the first N evaluation samples (default: all).")
    add_switch(group, "--pad_to_max_length", "Pad sources and targets to their largest length; otherwise to the longest of the batch.")
    group.add_argument(
        "--ignore_pad_token_for_loss", type=to_bool, default=True, metavar="BOOL", help="Leave padding out of the loss (default True)."
    )
    add_hub_flags(group)


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of the text generation in evaluation."""
    group = parser.add_argument_group("generation")
    group.add_argument("--num_beams", type=int, default=1, help="Beams of the search (default 1: greedy).")
    group.add_argument("--val_max_target_length", type=int, help="Largest number of generated tokens (default: --max_target_length).")
    group.add_argument("--val_min_target_length", type=int, default=0, help="Smallest number of generated tokens (default 0).")
    group.add_argument(
        "--n_val_batch_generations",
        type=int,
        default=5,
        help="Number of evaluation batches whose generated texts are saved as a table; the first rows are printed (default 5; 0 for none).",
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of model and tokenizer."""
    group = parser.add_argument_group("model")
    add_name_flags(group, "facebook/blenderbot-400M-distill")
    group.add_argument("--d_model", type=int, help="Width; overrides the configuration (128 when none is named).")
    group.add_argument("--encoder_layers", type=int, help="Blocks of the encoder; overrides the configuration (1 when none is named).")
    group.add_argument("--decoder_layers", type=int, help="Blocks of the decoder; overrides the configuration (2 when none is named).")
    group.add_argument("--num_attention_heads", type=int, help="Attention heads; overrides the configuration (4 when none is named).")


def check_data(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Raise a command-line error for invalid data flags; set the default length of generated texts."""
    check_files(parser, args, ("csv", "json"))
    if args.val_max_target_length is None:
        args.val_max_target_length = args.max_target_length
    check_at_least(parser, args, 1, "max_source_length", "max_target_length", "val_max_target_length", "num_beams", "n_train", "n_val")
    check_at_least(parser, args, 0, "val_min_target_length", "n_val_batch_generations")
    check_at_least(parser, args, 1, "d_model", "encoder_layers", "decoder_layers", "num_attention_heads")
    if args.val_min_target_length > args.val_max_target_length:
        parser.error(f"--val_min_target_length {args.val_min_target_length} is above --val_max_target_length {args.val_max_target_length}.")
