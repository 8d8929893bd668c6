"""Define the flags that the three experiments share, with the names of Hugging Face's scripts; each experiment links to this file."""

from __future__ import annotations

import argparse
import contextlib
import functools
import netrc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlparse

import transformers
from transformers import SchedulerType, TrainingArguments

REPORTERS = ("all", "tensorboard", "wandb", "comet_ml", "clearml", "mlflow", "trackio")


class FlagError(ValueError):
    """An error for flags, or files that they name, which cannot work; the message says why and what to do instead."""


def told_once(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate a script's ``main`` so that a `FlagError` ends every rank, and only the first rank prints the message, without traceback."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except FlagError as error:
            sys.exit(str(error) if is_first_rank() else 1)

    return run


def is_first_rank() -> bool:
    """Return whether this process is rank 0, from the variables that launchers set."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return next((os.environ[name] for name in names if os.environ.get(name)), "0") == "0"


def settle(training: TrainingArguments) -> None:
    """Show only errors of transformers and the first rank's progress bar, and pin memory only if there is an accelerator."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    training.dataloader_pin_memory = training.dataloader_pin_memory and training.device.type != "cpu"
    training.disable_tqdm = training.disable_tqdm or training.process_index != 0


def checkpoint_to_resume(training: TrainingArguments) -> str | None:
    """Return the folder of Trainer's ``--resume_from_checkpoint``; ``latest`` is the newest complete one in the output folder, or None."""
    if training.resume_from_checkpoint != "latest":
        return training.resume_from_checkpoint
    # transformers' get_last_checkpoint also returns an incomplete folder of a killed run.
    whole = [path.parent for path in Path(training.output_dir).glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda folder: int(folder.name.removeprefix("checkpoint-")))) if whole else None


def say(text: str) -> None:
    """Print a line on the first rank; do nothing for an empty text."""
    if text and is_first_rank():
        print(text, flush=True)


def line_of(numbers: Mapping[str, float]) -> str:
    """Return numbers as text, such as ``train loss 5.971, grad norm 0.912``."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.5g}" for name, value in numbers.items())


def files_first(args: argparse.Namespace, first_rank_first: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
    """Return a context in which to load data; the first rank enters it first if `datasets` writes files that the others reuse.

    Args:
        args: The data flags.
        first_rank_first: Function that returns a context which the other ranks enter after the first rank has left it.
    """
    named = any(getattr(args, name, None) for name in ("dataset_name", "task_name", "train_file"))
    return first_rank_first() if named else contextlib.nullcontext()


def trackers(args: argparse.Namespace) -> str | None:
    """Return the argument of `Accelerator(log_with=...)`; set wandb offline without an account, because it would wait for an answer."""
    if not args.with_tracking:
        return None
    if args.report_to in ("wandb", "all") and not has_wandb_account():
        os.environ["WANDB_MODE"] = "offline"
        say("wandb: no account is configured here, so the run is kept offline; `wandb sync` uploads it later.")
    return str(args.report_to)


def has_wandb_account() -> bool:
    """Return whether wandb can start without a question: environment or `wandb login` provide a mode or key."""
    if {"WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & os.environ.keys():
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host in netrc.netrc(Path(os.environ.get("NETRC", "~/.netrc")).expanduser()).hosts
    except (OSError, netrc.NetrcParseError):
        return False


class Parser(argparse.ArgumentParser):
    """A parser whose error messages are printed by the first rank only."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message on the first rank; end the process with exit status 2 on every rank."""
        if not is_first_rank():
            self.exit(2)
        super().error(message)


def to_bool(text: str) -> bool:
    """Return the value of a switch that has an explicit value (``--pad_to_max_length True``)."""
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r}: give True or False, or the flag alone")


def add_switch(group: argparse._ArgumentGroup, flag: str, help_text: str) -> None:
    """Add a flag that is off by default, on without a value, and accepts True or False."""
    group.add_argument(flag, nargs="?", const=True, default=False, type=to_bool, metavar="BOOL", help=help_text)


def add_hub_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of data and model that every example has."""
    group.add_argument(
        "--offline", action="store_true", help="Never access the hub; make text and tokenizer from Python's docstrings, and print a note."
    )


def add_split_flag(group: argparse._ArgumentGroup, percent: int) -> None:
    """Add the share of data that is held out without validation data, ``percent`` by default; `check_files` checks it."""
    group.add_argument(
        "--validation_split_percentage",
        type=int,
        default=percent,
        help=f"Percentage of the training data held out if there is no validation data (default {percent}).",
    )


def add_name_flags(group: argparse._ArgumentGroup, known: str) -> None:
    """Add the flags that name model, configuration and tokenizer.

    Args:
        group: Argument group that receives the flags.
        known: Names of the models whose shapes are built in (`offline.KNOWN_SHAPES`), for the help.
    """
    group.add_argument("--model_name_or_path", help="Pretrained model to start from; without it, weights are random.")
    group.add_argument("--config_name", help=f"Configuration by path or hub name. The configurations of {known} also work without network.")
    group.add_argument("--tokenizer_name", help="Tokenizer by path or hub name; without any name, one is trained on the text.")
    group.add_argument(
        "--vocab_size",
        type=int,
        help="Entries of the embedding, and of the tokenizer that is trained here (4096 when neither is named).",
    )


def add_training_flags(parser: argparse.ArgumentParser, *, batch_size: int = 8, epochs: int = 3) -> None:
    """Add the flags of the training loop.

    Args:
        parser: Parser that receives the flags.
        batch_size: Default number of samples per rank and micro-step.
        epochs: Default number of epochs.
    """
    group = parser.add_argument_group("training")
    group.add_argument(
        "--per_device_train_batch_size", type=int, default=batch_size, help=f"Samples per rank and micro-step (default {batch_size})."
    )
    group.add_argument(
        "--per_device_eval_batch_size", type=int, default=batch_size, help=f"The same when evaluating (default {batch_size})."
    )
    group.add_argument("--learning_rate", type=float, default=5e-5, help="Peak learning rate (default 5e-5).")
    group.add_argument("--weight_decay", type=float, default=0.0, help="Weight decay, not on biases and norms (default 0).")
    group.add_argument(
        "--max_grad_norm",
        type=float,
        default=1.0,
        help="Clip the gradient norm, 0 is off (default 1.0). Under a DeepSpeed config, its gradient_clipping applies instead.",
    )
    group.add_argument("--num_train_epochs", type=int, default=epochs, help=f"Epochs (default {epochs}).")
    group.add_argument("--max_train_steps", type=int, help="Optimizer steps; overrides --num_train_epochs.")
    group.add_argument(
        "--gradient_accumulation_steps",
        type=int,
        default=1,
        help="Micro-steps per optimizer step (default 1). A number in a DeepSpeed config takes precedence.",
    )
    group.add_argument(
        "--lr_scheduler_type",
        type=SchedulerType,
        choices=[kind.value for kind in SchedulerType],
        metavar="NAME",
        default=SchedulerType.LINEAR,
        help="Schedule of the learning rate (default linear). A scheduler in a DeepSpeed config takes precedence.",
    )
    group.add_argument("--num_warmup_steps", type=int, default=0, help="Optimizer steps of warm-up (default 0).")
    group.add_argument("--seed", type=int, default=42, help="Seed of weights, dropout and order of the data (default 42).")
    group.add_argument("--skip_initial_eval", action="store_true", help="Do not evaluate before training.")


def add_output_flags(parser: argparse.ArgumentParser, *, report_name: str) -> None:
    """Add the flags of a run's outputs.

    Args:
        parser: Parser that receives the flags.
        report_name: Default project name in trackers.
    """
    group = parser.add_argument_group("output")
    group.add_argument("--output_dir", help="Folder for model, tokenizer, checkpoints and results; without it, nothing is saved.")
    group.add_argument("--checkpointing_steps", help="Save the training state every N optimizer steps, or at the end of each 'epoch'.")
    group.add_argument(
        "--resume_from_checkpoint",
        metavar="FOLDER",
        help="Checkpoint folder to continue from; 'latest' is the newest one in --output_dir, or the start of training if there is none.",
    )
    group.add_argument("--logging_steps", type=int, default=1, help="Optimizer steps between two reports of the loss (default 1).")
    group.add_argument("--with_tracking", action="store_true", help="Send metrics to the trackers of --report_to.")
    group.add_argument("--report_to", choices=REPORTERS, default="all", help="Tracker to use (default: all that are installed).")
    group.add_argument("--report_name", default=report_name, help=f"Project name in trackers (default {report_name}).")


def check_files(parser: argparse.ArgumentParser, args: argparse.Namespace, extensions: Sequence[str]) -> None:
    """Raise a command-line error for contradicting data flags, missing or unsupported files, or an invalid percentage."""
    if args.dataset_name and (args.train_file or args.validation_file):
        parser.error(f"--dataset_name {args.dataset_name} and --train_file/--validation_file are two sources of text; give only one.")
    if args.validation_file and not args.train_file:
        parser.error(f"--validation_file {args.validation_file} needs --train_file.")
    for flag in ("train_file", "validation_file"):
        name = getattr(args, flag)
        if name and not name.endswith(tuple(f".{extension}" for extension in extensions)):
            parser.error(f"--{flag} {name}: the name must end in .{', .'.join(extensions[:-1])} or .{extensions[-1]}.")
        if name and "://" not in name and not Path(name).is_file():
            parser.error(f"--{flag} {name}: there is no such file.")
    if not 0 < args.validation_split_percentage < 100:
        parser.error(f"--validation_split_percentage {args.validation_split_percentage}: must be between 1 and 99.")


def check_run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Raise a command-line error for invalid values of the shared flags."""
    steps = args.checkpointing_steps
    if steps is not None and steps != "epoch" and not (steps.isdigit() and int(steps) > 0):
        parser.error(f"--checkpointing_steps {steps}: must be a positive number of optimizer steps, or 'epoch'.")
    for flag in ("checkpointing_steps", "with_tracking"):
        if getattr(args, flag) and not args.output_dir:
            parser.error(f"--{flag} needs --output_dir.")
    if args.resume_from_checkpoint == "latest" and not args.output_dir:
        parser.error("--resume_from_checkpoint latest needs --output_dir.")
    for flag in ("num_train_epochs", "max_train_steps"):
        if getattr(args, flag) is not None:
            check_at_least(parser, args, 1, flag)
    names = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "logging_steps")
    check_at_least(parser, args, 1, *names)
    check_at_least(parser, args, 0, "learning_rate", "weight_decay", "max_grad_norm", "num_warmup_steps")


def check_at_least(parser: argparse.ArgumentParser, args: argparse.Namespace, least: int, *flags: str) -> None:
    """Raise a command-line error for a flag whose value is below ``least``."""
    for flag in flags:
        value = getattr(args, flag)
        if value is not None and value < least:
            parser.error(f"--{flag} {value}: must be at least {least}.")
