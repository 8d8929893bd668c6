"""Command line of the causal language modelling example: the flags of the Hugging Face script of the same name, and a few of ours."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from transformers import SchedulerType

REPORTERS = ("all", "csv", "tensorboard", "wandb", "comet_ml", "clearml", "mlflow", "trackio")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Args:
        argv: Words after the program's name; None reads ``sys.argv``.

    Returns:
        One attribute per flag, names as on the command line.

    Raises:
        SystemExit: A flag is unknown or two flags contradict each other (argparse prints which, and the usage).
    """
    parser = argparse.ArgumentParser(
        description=(
            "Train a causal language model with Accelerate. The launcher decides how: one process, DDP or ZeRO 0-3. "
            "With neither --dataset_name nor --train_file it needs no network: it trains on the docstrings of the installed Python."
        )
    )
    _add_data_flags(parser)
    _add_model_flags(parser)
    _add_training_flags(parser)
    _add_output_flags(parser)
    args = parser.parse_args(argv)
    _check(parser, args)
    return args


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--dataset_name", help="Name of a dataset on the hub, e.g. wikitext.")
    group.add_argument("--dataset_config_name", help="Its configuration, e.g. wikitext-2-raw-v1.")
    group.add_argument("--train_file", help="A .txt, .csv or .json file to train on.")
    group.add_argument("--validation_file", help="A .txt, .csv or .json file to evaluate on.")
    group.add_argument(
        "--validation_split_percentage",
        type=int,
        default=5,
        help="Share of the training data held out where there is no validation data (default 5).",
    )
    group.add_argument("--block_size", type=int, default=128, help="Tokens per sequence (default 128).")
    group.add_argument("--max_train_samples", type=int, help="Keep only the first N training sequences.")
    group.add_argument("--max_eval_samples", type=int, help="Keep only the first N evaluation sequences.")
    group.add_argument("--preprocessing_num_workers", type=int, help="Processes that tokenize (default 1).")
    group.add_argument("--overwrite_cache", action="store_true", help="Tokenize again although a cached result exists.")
    group.add_argument("--no_keep_linebreaks", action="store_true", help="Drop the line breaks of .txt files.")


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model_name_or_path", help="Pretrained model to start from; without it the weights start random.")
    group.add_argument(
        "--config_name",
        help="Configuration by path or hub name. gpt2, gpt2-medium, gpt2-large and gpt2-xl also work without network.",
    )
    group.add_argument("--tokenizer_name", help="Tokenizer by path or hub name; without any name one is trained on the text.")
    group.add_argument("--use_slow_tokenizer", action="store_true", help="Use the tokenizer written in Python, where there is one.")
    group.add_argument("--model_type", default="gpt2", help="Architecture when no configuration is named (default gpt2).")
    group.add_argument("--trust_remote_code", action="store_true", help="Run code that comes with a hub model or dataset.")
    group.add_argument("--n_layer", type=int, help="Number of blocks; overrides the configuration (4 when none is named).")
    group.add_argument("--n_embd", type=int, help="Width; overrides the configuration (256 when none is named).")
    group.add_argument("--n_head", type=int, help="Attention heads; overrides the configuration (4 when none is named).")
    group.add_argument(
        "--vocab_size",
        type=int,
        help="Entries of the embedding, and of the tokenizer that is trained here (4096 when neither is named).",
    )
    group.add_argument(
        "--low_cpu_mem_usage",
        action="store_true",
        help="Accepted for old command lines: transformers 5 always loads this way.",
    )


def _add_training_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--per_device_train_batch_size", type=int, default=8, help="Sequences per rank and micro-step (default 8).")
    group.add_argument("--per_device_eval_batch_size", type=int, default=8, help="The same when evaluating (default 8).")
    group.add_argument("--learning_rate", type=float, default=5e-5, help="Peak learning rate (default 5e-5).")
    group.add_argument("--weight_decay", type=float, default=0.0, help="Weight decay, not on biases and norms (default 0).")
    group.add_argument(
        "--max_grad_norm",
        type=float,
        default=1.0,
        help="Clip the gradient norm, 0 is off (default 1.0). A DeepSpeed config decides by its own gradient_clipping.",
    )
    group.add_argument("--num_train_epochs", type=int, default=3, help="Epochs (default 3).")
    group.add_argument("--max_train_steps", type=int, help="Optimizer steps; overrides --num_train_epochs.")
    group.add_argument(
        "--gradient_accumulation_steps",
        type=int,
        default=1,
        help="Micro-steps per optimizer step (default 1). A number in a DeepSpeed config wins.",
    )
    group.add_argument(
        "--lr_scheduler_type",
        type=SchedulerType,
        choices=[kind.value for kind in SchedulerType],
        metavar="NAME",
        default=SchedulerType.LINEAR,
        help="Schedule of the learning rate (default linear). A scheduler in a DeepSpeed config wins.",
    )
    group.add_argument("--num_warmup_steps", type=int, default=0, help="Optimizer steps of warm-up (default 0).")
    group.add_argument("--seed", type=int, default=42, help="Seed of weights, dropout and order of the data (default 42).")
    group.add_argument("--skip_initial_eval", action="store_true", help="Do not evaluate before training.")


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--output_dir", help="Where model, tokenizer, checkpoints and results go; without it nothing is kept.")
    group.add_argument("--checkpointing_steps", help="Save the training state every N optimizer steps, or at the end of each 'epoch'.")
    group.add_argument("--resume_from_checkpoint", help="Folder that --checkpointing_steps wrote.")
    group.add_argument("--logging_steps", type=int, default=1, help="Optimizer steps between two reports of the loss (default 1).")
    group.add_argument("--with_tracking", action="store_true", help="Send metrics to the trackers of --report_to.")
    group.add_argument("--report_to", choices=REPORTERS, default="all", help="Which tracker (default all that are installed, and csv).")
    group.add_argument("--prompt", default="Return the", help="Start of the line that the reloaded model continues.")
    group.add_argument("--push_to_hub", action="store_true", help="Upload --output_dir to the hub at the end.")
    group.add_argument("--hub_model_id", help="Repository to upload to (default: the name of --output_dir).")
    group.add_argument("--hub_token", help="Token for the upload (default: the one stored by `hf auth login`).")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse combinations that cannot work, in the words of the command line."""
    if args.dataset_name and (args.train_file or args.validation_file):
        parser.error(f"--dataset_name {args.dataset_name} and --train_file/--validation_file are two sources of text: give one of them.")
    if args.validation_file and not args.train_file:
        parser.error(f"--validation_file {args.validation_file} needs --train_file.")
    for flag in ("train_file", "validation_file"):
        name = getattr(args, flag)
        if name and not name.endswith((".txt", ".csv", ".json")):
            parser.error(f"--{flag} {name}: the name must end in .txt, .csv or .json.")
    if not 0 < args.validation_split_percentage < 100:
        parser.error(f"--validation_split_percentage {args.validation_split_percentage}: must lie between 1 and 99.")
    steps = args.checkpointing_steps
    if steps is not None and steps != "epoch" and not (steps.isdigit() and int(steps) > 0):
        parser.error(f"--checkpointing_steps {steps}: must be a positive number of optimizer steps, or 'epoch'.")
    for flag in ("checkpointing_steps", "with_tracking", "push_to_hub"):
        if getattr(args, flag) and not args.output_dir:
            parser.error(f"--{flag} needs --output_dir.")
    for flag in ("block_size", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "logging_steps"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag} {getattr(args, flag)}: must be at least 1.")
