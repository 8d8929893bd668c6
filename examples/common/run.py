"""One training run on stock Accelerate: what the scripts without Trainer have in common, from the accelerator to the table at the end.

Nothing in here knows which engine runs underneath. A script gives the model, the data and a function that evaluates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from common.hub import check_offline, push_folder
from common.measure import (
    count_parameters,
    expected_state_bytes,
    maximum_over_ranks,
    measured_state_bytes,
    peak_memory_bytes,
    stopwatch,
)
from common.optimizer import build_optimizer, build_scheduler, deepspeed_section
from common.ranks import Ranks, leaves_files
from common.results import RESULTS_FILE, RunFacts, RunResults, metrics_text, results_table, start_panel, wide_console, write_results
from common.steps import Progress, StepPlan, latest_checkpoint, plan_steps
from common.tracking import make_trackers, tracker_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Task:
    """What makes one example differ from another."""

    title: str  # of the panel
    sample: str  # what one sample is
    evaluate: Callable[[Run], dict[str, float]]  # metrics over the evaluation data of all ranks (collective)
    headline: tuple[str, ...]  # metrics that go into the table


@dataclass
class Run:
    """The objects of one run, as `Accelerator.prepare` returned them."""

    accelerator: Accelerator
    args: argparse.Namespace
    task: Task
    model: Any
    optimizer: Any
    scheduler: Any
    train_loader: Any
    eval_loader: Any
    plan: StepPlan
    progress: Progress = field(default_factory=Progress)


@dataclass
class EpochRecord:
    """What one epoch, or the part of it that was run, measured."""

    train_loss: float
    train_seconds: float
    micro_steps: int
    samples: int  # of all ranks
    metrics: dict[str, float] = field(default_factory=dict)
    eval_seconds: float = 0.0


def build_accelerator(args: argparse.Namespace, *named: str, **options: Any) -> Accelerator:
    """Start Accelerate with the trackers of the flags; quiet on all ranks but the first.

    Args:
        args: The shared flags; what they name on the hub is settled first (see `common.hub.check_offline`).
        *named: Flags besides the model's that may name something on the hub.
        **options: Further keywords of `Accelerator`.
    """
    replaced = check_offline(args, *named)
    trackers, note = make_trackers(args)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=trackers or None,
        project_dir=args.output_dir,
        # The order of an epoch depends on its number alone, so a resumed run finds the batches it has not seen.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
        **options,
    )
    for line in filter(None, (replaced, note)):
        accelerator.print(line)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not (accelerator.is_main_process and leaves_files(args)):
        datasets.disable_progress_bars()
    if args.output_dir and accelerator.is_main_process:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    return accelerator


def ranks_of(accelerator: Accelerator) -> Ranks:
    """The accelerator as code that loads data sees it."""
    return Ranks(accelerator.main_process_first, accelerator.print)


def build_run(
    accelerator: Accelerator,
    args: argparse.Namespace,
    task: Task,
    model: PreTrainedModel,
    *,
    data: tuple[Any, Any],
    collators: tuple[Any, Any],
) -> Run:
    """Make loaders, optimizer and scheduler and hand everything to Accelerate.

    Args:
        accelerator: Of `build_accelerator`.
        args: The shared flags.
        task: What is trained.
        model: Not yet on the device; under ZeRO-3 built inside ``zero.Init``.
        data: Training and evaluation samples.
        collators: What makes batches of them.

    Returns:
        The run at its first step.
    """
    accumulation = deepspeed_section(accelerator, "gradient_accumulation_steps")
    plan = plan_steps(
        len(data[0]),
        micro_batch_size=args.per_device_train_batch_size,
        ranks=accelerator.num_processes,
        accumulation_steps=accumulation if isinstance(accumulation, int) else accelerator.gradient_accumulation_steps,
        num_epochs=args.num_train_epochs,
        max_train_steps=args.max_train_steps,
    )
    if deepspeed_section(accelerator, "train_micro_batch_size_per_gpu") == "auto":
        # Accelerate would fill in the smaller of the two loaders' batch sizes, the evaluation's included.
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
    generator = torch.Generator().manual_seed(args.seed)  # of their own, so that loaders draw nothing from dropout's stream
    train_loader: Any = DataLoader(data[0], args.per_device_train_batch_size, shuffle=True, collate_fn=collators[0], generator=generator)
    eval_loader: Any = DataLoader(data[1], args.per_device_eval_batch_size, collate_fn=collators[1], generator=generator)
    optimizer = build_optimizer(model, accelerator, args)
    scheduler = build_scheduler(optimizer, accelerator, args, plan.max_train_steps)
    prepared = accelerator.prepare(model, optimizer, train_loader, eval_loader, scheduler)
    engine, optimizer, train_loader, eval_loader, scheduler = prepared
    return Run(accelerator, args, task, engine, optimizer, scheduler, train_loader, eval_loader, plan)


def precision_of(accelerator: Accelerator) -> str:
    """bf16, fp16 or fp32; under a DeepSpeed configuration its sections decide."""
    for name in ("bf16", "fp16"):
        section = deepspeed_section(accelerator, name) or {}
        if str(section.get("enabled", False)).lower() == "true":
            return name
    return "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision


def describe(run: Run) -> RunFacts:
    """Collect the facts of the start panel and of the results file."""
    accelerator, args = run.accelerator, run.args
    zero = deepspeed_section(accelerator, "zero_optimization")
    stage = None if accelerator.state.deepspeed_plugin is None else int((zero or {}).get("stage", 0))
    precision, parameters = precision_of(accelerator), count_parameters(run.model)
    sizes = {"ranks": accelerator.num_processes, "sixteen_bit": precision in ("bf16", "fp16")}
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return RunFacts(
        task=run.task.title,
        stage=stage,
        ranks=accelerator.num_processes,
        backend=torch.distributed.get_backend() if initialized else "none",
        device=accelerator.device.type,
        precision=precision,
        parameters=parameters,
        train_samples=len(run.train_loader.dataset),
        eval_samples=len(run.eval_loader.dataset),
        sample=run.task.sample,
        micro_batch_size=args.per_device_train_batch_size,
        eval_batch_size=args.per_device_eval_batch_size,
        accumulation_steps=accelerator.gradient_accumulation_steps,
        max_train_steps=run.plan.max_train_steps,
        expected_state_bytes=expected_state_bytes(parameters, stage=stage, **sizes),
        stage0_state_bytes=expected_state_bytes(parameters, stage=None if stage is None else 0, **sizes),
    )


def evaluate(run: Run) -> tuple[dict[str, float], float]:
    """Evaluate with the task's function (collective).

    Returns:
        The metrics, and the seconds it took.
    """
    run.model.eval()
    with torch.no_grad(), stopwatch(run.accelerator) as watch:
        metrics = run.task.evaluate(run)
    run.model.train()
    return metrics, watch.seconds


def train_micro_steps(run: Run) -> Iterator[tuple[torch.Tensor, float]]:
    """Train to the end of the epoch, or of the run, one optimizer step at a time.

    Yields:
        After each optimizer step: this rank's mean loss over its micro-steps (0-dim, on the device), and the gradient norm.
    """
    accelerator, loader, progress = run.accelerator, run.train_loader, run.progress
    loader.set_epoch(progress.epoch)
    if progress.micro_steps_in_epoch:
        loader = accelerator.skip_first_batches(loader, progress.micro_steps_in_epoch)
    losses: list[torch.Tensor] = []
    grad_norm = float("nan")
    for batch in loader:
        with accelerator.accumulate(run.model):
            loss = run.model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and run.args.max_grad_norm > 0:
                norm = accelerator.clip_grad_norm_(run.model.parameters(), run.args.max_grad_norm)
                grad_norm = float("nan") if norm is None else float(norm)
            run.optimizer.step()
            run.scheduler.step()
            run.optimizer.zero_grad()
        losses.append(loss.detach().float())
        progress.micro_steps_in_epoch += 1
        if accelerator.sync_gradients:
            progress.steps += 1
            yield torch.stack(losses).mean(), grad_norm
            losses = []
            if progress.steps >= run.plan.max_train_steps:
                return


def train_epoch(run: Run, bar: tqdm) -> EpochRecord:
    """Train one epoch: loss on the progress bar and in the trackers, checkpoints every N steps.

    Args:
        run: Moves to its next epoch, unless the run ends within this one.
        bar: Progress bar over the optimizer steps of the whole run.
    """
    accelerator, args, progress = run.accelerator, run.args, run.progress
    save_every = int(args.checkpointing_steps) if (args.checkpointing_steps or "").isdigit() else None
    losses: list[torch.Tensor] = []
    first_micro_step = progress.micro_steps_in_epoch
    with stopwatch(accelerator) as watch:
        for loss, grad_norm in train_micro_steps(run):
            losses.append(loss)
            if progress.steps % args.logging_steps == 0:
                mean_loss = accelerator.reduce(loss, reduction="mean").item()
                rate = run.scheduler.get_last_lr()[0]
                bar.set_postfix(loss=f"{mean_loss:.3f}", grad_norm=f"{grad_norm:.2f}", refresh=False)
                if bar.disable:  # a log file gets lines in place of an animated bar
                    step = f"step {progress.steps}/{run.plan.max_train_steps}"
                    accelerator.print(f"{step}  loss {mean_loss:.4f}  grad_norm {grad_norm:.3f}  lr {rate:.3g}", flush=True)
                accelerator.log({"train_loss": mean_loss, "grad_norm": grad_norm, "learning_rate": rate}, step=progress.steps)
            bar.update(1)
            if save_every and progress.steps % save_every == 0:
                save_checkpoint(run, f"step_{progress.steps}")
    micro_steps = progress.micro_steps_in_epoch - first_micro_step
    samples = micro_steps * args.per_device_train_batch_size * accelerator.num_processes
    train_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item() if losses else float("nan")
    if progress.micro_steps_in_epoch >= run.plan.micro_steps_per_epoch:
        progress.next_epoch()
    return EpochRecord(train_loss, watch.seconds, micro_steps, samples)


def train(run: Run) -> list[EpochRecord]:
    """Train and evaluate epoch after epoch until the planned number of steps."""
    accelerator, progress = run.accelerator, run.progress
    bar = tqdm(
        total=run.plan.max_train_steps,
        initial=progress.steps,
        desc="train",
        file=sys.stdout,
        disable=not (accelerator.is_main_process and sys.stdout.isatty()),
    )
    records = []
    while progress.steps < run.plan.max_train_steps:
        record = train_epoch(run, bar)
        record.metrics, record.eval_seconds = evaluate(run)
        records.append(record)
        headline, speed = _headline(run, record.metrics), record.samples / record.train_seconds
        if accelerator.is_main_process:
            bar.clear()
            line = f"step {progress.steps}: {metrics_text(headline)}, train loss {record.train_loss:.3f}, {speed:,.1f} samples/s"
            bar.write(line, file=sys.stdout)
        times = {"train_seconds": record.train_seconds, "eval_seconds": record.eval_seconds, "samples_per_second": speed}
        accelerator.log(record.metrics | {"epoch_train_loss": record.train_loss} | times, step=progress.steps)
        if run.args.checkpointing_steps == "epoch":
            save_checkpoint(run, f"epoch_{progress.epoch}")
    bar.close()
    return records


def save_checkpoint(run: Run, name: str) -> None:
    """Save everything a resumed run needs under ``output_dir/name`` (collective)."""
    folder = Path(run.args.output_dir) / name
    run.accelerator.save_state(str(folder))
    run.accelerator.wait_for_everyone()  # the position comes last: it marks the checkpoint as whole
    if run.accelerator.is_main_process:
        run.progress.save(folder)
    run.accelerator.wait_for_everyone()


def checkpoint_to_resume(args: argparse.Namespace) -> Path | None:
    """Folder that ``--resume_from_checkpoint`` asks for; None to begin at the start."""
    if args.resume_from_checkpoint == "latest":
        return latest_checkpoint(Path(args.output_dir))
    return Path(args.resume_from_checkpoint) if args.resume_from_checkpoint else None


def load_checkpoint(run: Run, folder: Path) -> None:
    """Continue from a folder that `save_checkpoint` wrote (collective)."""
    run.progress = Progress.load(folder)
    run.accelerator.load_state(str(folder))
    run.accelerator.print(f"Resumed from {folder}: {run.progress.steps} of {run.plan.max_train_steps} steps are done.")


def save_model(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model and tokenizer in Hugging Face format (collective: at stage 3 every rank sends its shards)."""
    accelerator, folder = run.accelerator, run.args.output_dir
    accelerator.unwrap_model(run.model).save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(run.model),
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(folder)
    accelerator.wait_for_everyone()


def finish(run: Run, tokenizer: PreTrainedTokenizerBase, show: Callable[[], None]) -> None:
    """Keep the model where the flags say so, and end the run (collective).

    Args:
        run: After training.
        tokenizer: Lies beside the model.
        show: Loads the saved folder on the first rank, as any user would, and prints what the model does.
    """
    accelerator, args = run.accelerator, run.args
    if args.output_dir:
        save_model(run, tokenizer)
        if accelerator.is_main_process:
            # As long as a stage-3 configuration is registered, from_pretrained builds shards and waits for the other ranks.
            transformers.integrations.deepspeed.unset_hf_deepspeed_config()
            show()
            if args.push_to_hub:
                print(f"Uploaded to {push_folder(Path(args.output_dir), args.hub_model_id, args.hub_token)}.")
        accelerator.wait_for_everyone()
    accelerator.end_training()


def report(run: Run, facts: RunFacts, records: list[EpochRecord]) -> None:
    """Print the table and write ``results.json`` (collective)."""
    accelerator = run.accelerator
    seconds = sum(record.train_seconds for record in records)
    results = RunResults(
        train_seconds_per_epoch=seconds / sum(record.micro_steps for record in records) * run.plan.micro_steps_per_epoch,
        eval_seconds_per_epoch=sum(record.eval_seconds for record in records) / len(records),
        samples_per_second=sum(record.samples for record in records) / seconds,
        peak_memory_bytes=maximum_over_ranks(peak_memory_bytes(accelerator.device), accelerator),
        state_bytes=maximum_over_ranks(measured_state_bytes(run.model, run.optimizer), accelerator),
        train_loss=records[-1].train_loss,
        metrics_before=_headline(run, run.progress.metrics_before),
        metrics=_headline(run, records[-1].metrics),
        steps=run.progress.steps,
    )
    if accelerator.is_main_process:
        wide_console().print(results_table([(facts, results)]))
        if run.args.output_dir:
            write_results(Path(run.args.output_dir) / RESULTS_FILE, facts, results)


def train_and_report(run: Run) -> None:
    """Do the whole job (collective): panel, resuming, evaluation before training, epochs, table."""
    accelerator, args = run.accelerator, run.args
    facts = describe(run)
    if accelerator.is_main_process:
        wide_console().print(start_panel(facts, measured_state_bytes(run.model, run.optimizer)))
    if args.with_tracking:
        flags = {name: value for name, value in vars(args).items() if name != "hub_token"}
        accelerator.init_trackers(args.report_name, flags, tracker_options(args))
    folder = checkpoint_to_resume(args)
    if folder is not None:
        load_checkpoint(run, folder)
    else:
        if args.resume_from_checkpoint:
            accelerator.print(f"--resume_from_checkpoint latest: no checkpoint in {args.output_dir} yet, beginning at the start.")
        if not args.skip_initial_eval:
            run.progress.metrics_before = evaluate(run)[0]
            accelerator.print(f"Before training: {metrics_text(_headline(run, run.progress.metrics_before))}")
    records = train(run)
    if records:
        report(run, facts, records)
    else:
        accelerator.print(f"Nothing to train: {run.progress.steps} of {run.plan.max_train_steps} steps were done already.")


@contextmanager
def construction(accelerator: Accelerator, args: argparse.Namespace) -> Iterator[None]:
    """Context to build the model in: seeded, and with ``--whole_init`` outside ``zero.Init``.

    Afterwards the seed differs from rank to rank, so that dropout does.
    """
    plugin = accelerator.state.deepspeed_plugin if args.whole_init else None
    set_seed(args.seed)
    if plugin is not None:
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    yield
    if plugin is not None:
        transformers.integrations.deepspeed.set_hf_deepspeed_config(plugin.dschf)
    set_seed(args.seed, device_specific=True)


def _headline(run: Run, metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in run.task.headline if name in metrics}
