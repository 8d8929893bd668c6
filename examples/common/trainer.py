"""What the scripts on transformers' Trainer have in common: their command line, the clock, the table at the end."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import datasets
import torch
import transformers
from transformers import HfArgumentParser, TrainerCallback, TrainingArguments

from common.arguments import Parser
from common.hub import check_offline
from common.measure import count_parameters, expected_state_bytes, maximum_over_ranks, measured_state_bytes, peak_memory_bytes
from common.ranks import Ranks
from common.results import RESULTS_FILE, RunFacts, RunResults, results_table, wide_console, write_results

if TYPE_CHECKING:
    from transformers import Trainer

Arguments = TypeVar("Arguments", bound=TrainingArguments)


class TrainerParser(Parser, HfArgumentParser):
    """Parser of dataclasses and flags together; complaints are printed by one rank only."""


def parse_arguments(
    kind: type[Arguments],
    description: str,
    add_flags: Sequence[Callable[[argparse.ArgumentParser], None]],
    check: Callable[[argparse.ArgumentParser, argparse.Namespace], None],
    argv: Sequence[str] | None = None,
) -> tuple[Arguments, argparse.Namespace]:
    """Read a command line of `TrainingArguments` and the example's own flags.

    Args:
        kind: Class of the training arguments.
        description: First lines of the help.
        add_flags: Add the flags of data and model.
        check: Refuses values of those.
        argv: Words after the program's name; None reads ``sys.argv``.

    Returns:
        The training arguments, and the other flags with ``output_dir`` and ``seed``.
    """
    parser = TrainerParser(kind, description=description)
    for add in add_flags:
        add(parser)
    training, flags = parser.parse_args_into_dataclasses(args=argv)
    check(parser, flags)
    flags.output_dir, flags.seed = training.output_dir, training.seed
    return training, flags


def start(training: TrainingArguments, args: argparse.Namespace, *named: str) -> Ranks:
    """Settle what the flags name on the hub, and let only warnings of the first rank through, and its progress bar.

    Args:
        training: Of `parse_arguments`.
        args: The other flags; see `common.hub.check_offline`.
        *named: Flags besides the model's that may name something on the hub.

    Returns:
        The training arguments as code that loads data sees them.
    """
    replaced = check_offline(args, *named)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    training.dataloader_pin_memory = training.dataloader_pin_memory and training.device.type != "cpu"
    training.disable_tqdm = training.disable_tqdm or training.process_index != 0
    ranks = Ranks(partial(training.main_process_first, local=False), print if training.process_index == 0 else lambda text: None)
    if replaced:
        ranks.say(replaced)
    return ranks


class Clock(TrainerCallback):
    """Seconds spent in training epochs, evaluation left out."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.epochs = 0.0  # epochs trained, a part of one as a fraction
        self._start = 0.0
        self._first_epoch = 0.0

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember where a resumed run goes on."""
        self._first_epoch = state.epoch or 0.0

    def on_epoch_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Start."""
        self._start = time.perf_counter()

    def on_evaluate(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out an evaluation in the middle of an epoch."""
        self._start += float((kwargs.get("metrics") or {}).get("eval_runtime", 0.0))

    def on_epoch_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        self.seconds += time.perf_counter() - self._start
        self.epochs = float(state.epoch or 0.0) - self._first_epoch


def train(trainer: Trainer) -> Clock:
    """Train, from a checkpoint if the arguments say so (``latest`` is the newest one in ``output_dir``).

    Returns:
        The clock of the training.
    """
    clock = Clock()
    trainer.add_callback(clock)
    checkpoint = trainer.args.resume_from_checkpoint
    if checkpoint == "latest":
        # transformers' own get_last_checkpoint also takes a folder that was being written when the run was killed.
        whole = [path.parent for path in Path(trainer.args.output_dir).glob("checkpoint-*/trainer_state.json")]
        checkpoint = str(max(whole, key=lambda folder: int(folder.name.removeprefix("checkpoint-")))) if whole else None
    trainer.train(resume_from_checkpoint=checkpoint)
    return clock


def report(trainer: Trainer, clock: Clock, *, title: str, sample: str, metrics: Mapping[str, float], eval_seconds: float) -> None:
    """Print the table and write ``results.json`` (collective).

    Args:
        trainer: After training.
        clock: Result of `train`.
        title: What was trained.
        sample: What one sample is.
        metrics: What the task is judged by.
        eval_seconds: Seconds of the last evaluation.
    """
    accelerator, args = trainer.accelerator, trainer.args
    facts = describe(trainer, title, sample)
    log = [entry for entry in trainer.state.log_history if "train_loss" in entry]
    samples = clock.epochs * facts.train_samples
    results = RunResults(
        train_seconds_per_epoch=clock.seconds / clock.epochs,
        eval_seconds_per_epoch=eval_seconds,
        samples_per_second=samples / clock.seconds,
        peak_memory_bytes=maximum_over_ranks(peak_memory_bytes(accelerator.device), accelerator),
        state_bytes=maximum_over_ranks(measured_state_bytes(trainer.model_wrapped, trainer.optimizer), accelerator),
        train_loss=log[-1]["train_loss"],
        metrics_before={},
        metrics=dict(metrics),
        steps=trainer.state.global_step,
    )
    if args.process_index == 0:
        wide_console().print(results_table([(facts, results)]))
        write_results(Path(args.output_dir) / RESULTS_FILE, facts, results)


def describe(trainer: Trainer, title: str, sample: str) -> RunFacts:
    """Collect the facts of the results file; under tensor parallelism the parameters are those of one rank."""
    accelerator, args = trainer.accelerator, trainer.args
    plugin = accelerator.state.deepspeed_plugin
    config = {} if plugin is None else plugin.deepspeed_config
    stage = None if plugin is None else int(config.get("zero_optimization", {}).get("stage", 0))
    split = max(1, int(config.get("tensor_parallel", {}).get("autotp_size", 1)))
    parameters = count_parameters(trainer.model_wrapped)
    sizes = {"ranks": args.world_size // split, "sixteen_bit": args.bf16 or args.fp16}
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return RunFacts(
        task=title,
        stage=stage,
        ranks=args.world_size,
        backend=torch.distributed.get_backend() if initialized else "none",
        device=accelerator.device.type,
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        parameters=parameters,
        train_samples=len(trainer.train_dataset),
        eval_samples=len(trainer.eval_dataset),
        sample=sample,
        micro_batch_size=args.per_device_train_batch_size,
        eval_batch_size=args.per_device_eval_batch_size,
        accumulation_steps=args.gradient_accumulation_steps,
        max_train_steps=trainer.state.max_steps,
        expected_state_bytes=expected_state_bytes(parameters, stage=stage, **sizes),
        stage0_state_bytes=expected_state_bytes(parameters, stage=None if stage is None else 0, **sizes),
        tensor_parallel_size=split,
    )
