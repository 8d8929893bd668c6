"""Define the command line of the language modelling examples: the flags of the Hugging Face script of the same name, and a few more."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flags import (
    FlagError,
    Parser,
    add_hub_flags,
    add_name_flags,
    add_output_flags,
    add_split_flag,
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
            "Train a causal language model with Accelerate. The launcher file selects one process, DDP or ZeRO 0-3. "
            "With neither --dataset_name nor --train_file it needs no network: it trains on the docstrings of the installed Python."
        )
    )
    add_data_flags(parser)
    add_model_flags(parser)
    add_training_flags(parser)
    add_output_flags(parser, report_name="clm_no_trainer")
    parser.add_argument("--prompt", default="Return the", help="Start of the line that the reloaded model continues.")
    args = parser.parse_args(argv)
    check_data(parser, args)
    check_run(parser, args)
    return args


def parse_mlm_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line of the masked language model, like `parse_arguments`."""
    parser = Parser(
        description=(
            "Train a masked language model (BERT) with Accelerate, under a launcher file, or with --deepspeed_config under torchrun. "
            "With neither --dataset_name nor --train_file it needs no network: it trains on the docstrings of the installed Python."
        )
    )
    add_data_flags(parser)
    add_model_flags(parser, model_type="bert")
    group = parser.add_argument_group("masks")
    group.add_argument("--mlm_probability", type=float, default=0.15, help="Share of tokens that the model must predict (default 0.15).")
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed_config", metavar="FILE", help="DeepSpeed JSON file; its batch sizes replace those of the flags.")
    group.add_argument("--freeze_step", type=int, help="1-bit Adam's number of uncompressed steps; replaces the number in the JSON file.")
    add_training_flags(parser)
    add_output_flags(parser, report_name="mlm_no_trainer")
    args = parser.parse_args(argv)
    if args.deepspeed_config:  # a learning rate in the file replaces the default of the flag; one that is given must equal it
        parser.set_defaults(learning_rate=learning_rate_of(args.deepspeed_config, args.learning_rate))
        args = parser.parse_args(argv)
    check_data(parser, args)
    check_run(parser, args)
    check_at_least(parser, args, 1, "freeze_step")
    if not 0 < args.mlm_probability < 1:
        parser.error(f"--mlm_probability {args.mlm_probability}: must be between 0 and 1.")
    if args.freeze_step and not args.deepspeed_config:
        parser.error("--freeze_step needs --deepspeed_config.")
    return args


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of the data: its source and the lengths of samples."""
    group = parser.add_argument_group("data")
    group.add_argument("--dataset_name", help="Name of a dataset on the hub, e.g. wikitext.")
    group.add_argument("--dataset_config_name", help="Its configuration, e.g. wikitext-2-raw-v1.")
    group.add_argument("--train_file", help="A .txt, .csv or .json file to train on.")
    group.add_argument("--validation_file", help="A .txt, .csv or .json file to evaluate on.")
    add_split_flag(group, 5)
    group.add_argument("--block_size", "--max_seq_length", type=int, default=128, help="Tokens per sequence (default 128).")
    group.add_argument("--max_train_samples", type=int, help="Keep only the first N training sequences.")
    group.add_argument("--max_eval_samples", type=int, help="Keep only the first N evaluation sequences.")
    group.add_argument("--no_keep_linebreaks", action="store_true", help="Drop the line breaks of .txt files.")
    add_hub_flags(group)


def add_model_flags(parser: argparse.ArgumentParser, model_type: str = "gpt2") -> None:
    """Add flags of model and tokenizer.

    Args:
        parser: Parser that receives the flags.
        model_type: Default architecture.
    """
    group = parser.add_argument_group("model")
    add_name_flags(group, "GPT-2 (gpt2 to gpt2-xl) or BERT")
    group.add_argument("--model_type", default=model_type, help=f"Architecture when no configuration is named (default {model_type}).")
    group.add_argument("--n_layer", type=int, help="Number of blocks; overrides the configuration (4 when none is named).")
    group.add_argument("--n_embd", type=int, help="Width; overrides the configuration (256 when none is named).")
    group.add_argument("--n_head", type=int, help="Attention heads; overrides the configuration (4 when none is named).")
    group.add_argument(
        "--low_cpu_mem_usage",
        action="store_true",
        help="No effect; accepted for old command lines, because transformers 5 always loads this way.",
    )


def check_data(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Raise a command-line error for invalid data flags."""
    check_files(parser, args, ("txt", "csv", "json"))
    check_at_least(parser, args, 1, "block_size", "max_train_samples", "max_eval_samples")


def learning_rate_of(path: str, otherwise: float) -> float:
    """Return the learning rate of the optimizer in a DeepSpeed JSON; ``otherwise`` if it has none, or cannot be read."""
    try:
        rate = json.loads(Path(path).read_text(encoding="utf-8"))["optimizer"]["params"]["lr"]
    except (OSError, ValueError, LookupError, TypeError):
        return otherwise  # `read_deepspeed_config` reports a file that cannot be read
    return float(rate) if isinstance(rate, (int, float)) else otherwise


def read_deepspeed_config(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the JSON of ``--deepspeed_config``, completed with the keys that Accelerate requires and DeepSpeed's own scripts leave out.

    Args:
        args: Parsed flags; the batch sizes in the file replace those of the flags.
        ranks: Number of data-parallel ranks.

    Raises:
        FlagError: The file cannot be read, or its batch sizes do not fit the number of ranks.
    """
    path = args.deepspeed_config
    try:
        config: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise FlagError(f"--deepspeed_config {path}: {error}") from error
    micro = config.get("train_micro_batch_size_per_gpu", "auto")
    if isinstance(micro, int):
        args.per_device_train_batch_size = micro
    micro, total = args.per_device_train_batch_size, config.get("train_batch_size", "auto")
    if isinstance(total, int) and not isinstance(config.get("gradient_accumulation_steps"), int):
        if total % (micro * ranks):
            raise FlagError(f"--deepspeed_config {path}: train_batch_size {total} is not a multiple of {micro} per rank x {ranks} ranks.")
        config["gradient_accumulation_steps"] = total // (micro * ranks)
    config.setdefault("gradient_accumulation_steps", args.gradient_accumulation_steps)
    config.setdefault("zero_optimization", {"stage": 0})
    if args.freeze_step:
        config.setdefault("optimizer", {}).setdefault("params", {})["freeze_step"] = args.freeze_step
    return config


def launched_ranks() -> int:
    """Return the number of processes that torchrun, Open MPI, MPICH or Slurm started."""
    names = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
    return int(next((os.environ[name] for name in names if os.environ.get(name)), "1"))
