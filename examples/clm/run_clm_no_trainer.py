"""Train a causal language model with stock Accelerate: one process, DDP, or ZeRO 0-3, whatever the launcher says.

    accelerate launch --config_file examples/clm/accelerate_zero3.yaml examples/clm/run_clm_no_trainer.py --output_dir runs/zero3

Nothing in here knows which engine runs underneath. See README.md beside this file for the commands and what to expect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from arguments import parse_arguments
from data import DEFAULT_VOCAB_SIZE, cached_tokenizer, load_raw_datasets, make_blocks
from measure import count_parameters, expected_state_bytes, maximum_over_ranks, measured_state_bytes, peak_memory_bytes, stopwatch
from model import (
    build_config,
    build_model,
    build_optimizer,
    build_scheduler,
    deepspeed_section,
    finish_config,
    named_tokenizer,
)
from results import RunFacts, RunResults, results_table, start_panel, to_perplexity, wide_console, write_results
from steps import Progress, StepPlan, plan_steps
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from tracking import make_trackers, tracker_options
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, default_data_collator

GENERATED_TOKENS = 40


@dataclass
class Run:
    """The objects of one run, as `Accelerator.prepare` returned them."""

    accelerator: Accelerator
    args: argparse.Namespace
    model: Any
    optimizer: Any
    scheduler: Any
    train_loader: Any
    eval_loader: Any
    plan: StepPlan
    progress: Progress


@dataclass
class EpochRecord:
    """What one epoch, or the part of it that was run, measured."""

    train_loss: float
    train_seconds: float
    tokens: int  # of all ranks
    eval_loss: float = float("nan")
    eval_seconds: float = 0.0


def build_accelerator(args: argparse.Namespace) -> Accelerator:
    """Start Accelerate with the trackers of the flags; quiet on all ranks but the first."""
    trackers, note = make_trackers(args)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=trackers or None,
        project_dir=args.output_dir,
        # The order of an epoch depends on its number alone, so a resumed run finds the batches it has not seen.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    if note:
        accelerator.print(note)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not (accelerator.is_main_process and args.dataset_name):
        datasets.disable_progress_bars()
    if args.output_dir and accelerator.is_main_process:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    return accelerator


def build_run(accelerator: Accelerator, args: argparse.Namespace) -> tuple[Run, PreTrainedTokenizerBase]:
    """Load text, tokenizer and model, and hand everything to Accelerate.

    Returns:
        The run at its first step, and the tokenizer.
    """
    config, note = build_config(args)
    if note:
        accelerator.print(note)
    # Rank 0 goes first where it leaves files for the others to find; parsing the standard library leaves none, so all do it at once.
    rank_0_first = accelerator.main_process_first if args.dataset_name or args.train_file else nullcontext
    with rank_0_first():
        raw = load_raw_datasets(args)
    with accelerator.main_process_first():
        tokenizer = named_tokenizer(args)
        if tokenizer is None:
            cache_dir = Path(args.output_dir) if args.output_dir else None
            tokenizer = cached_tokenizer(raw["train"]["text"][:], args.vocab_size or DEFAULT_VOCAB_SIZE, cache_dir)
    with rank_0_first():
        train_blocks, eval_blocks = make_blocks(raw, tokenizer, args)

    set_seed(args.seed)
    model = build_model(finish_config(config, tokenizer, args), tokenizer, args)
    set_seed(args.seed, device_specific=True)  # dropout differs from rank to rank

    accumulation = deepspeed_section(accelerator, "gradient_accumulation_steps")
    plan = plan_steps(
        len(train_blocks),
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
    train_loader: Any = DataLoader(
        train_blocks, args.per_device_train_batch_size, shuffle=True, collate_fn=default_data_collator, generator=generator
    )
    eval_loader: Any = DataLoader(eval_blocks, args.per_device_eval_batch_size, collate_fn=default_data_collator, generator=generator)
    optimizer = build_optimizer(model, accelerator, args)
    scheduler = build_scheduler(optimizer, accelerator, args, plan.max_train_steps)
    prepared = accelerator.prepare(model, optimizer, train_loader, eval_loader, scheduler)
    model, optimizer, train_loader, eval_loader, scheduler = prepared
    return Run(accelerator, args, model, optimizer, scheduler, train_loader, eval_loader, plan, Progress()), tokenizer


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
    stage = None if zero is None else int(zero.get("stage", 0))
    precision, parameters = precision_of(accelerator), count_parameters(run.model)
    sizes = {"ranks": accelerator.num_processes, "sixteen_bit": precision in ("bf16", "fp16")}
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return RunFacts(
        stage=stage,
        ranks=accelerator.num_processes,
        backend=torch.distributed.get_backend() if initialized else "none",
        device=accelerator.device.type,
        precision=precision,
        parameters=parameters,
        train_sequences=len(run.train_loader.dataset),
        eval_sequences=len(run.eval_loader.dataset),
        block_size=args.block_size,
        micro_batch_size=args.per_device_train_batch_size,
        accumulation_steps=accelerator.gradient_accumulation_steps,
        max_train_steps=run.plan.max_train_steps,
        expected_state_bytes=expected_state_bytes(parameters, stage=stage, **sizes),
        stage0_state_bytes=expected_state_bytes(parameters, stage=None if stage is None else 0, **sizes),
    )


@torch.no_grad()
def evaluate(run: Run) -> tuple[float, float]:
    """Mean loss over the evaluation sequences of all ranks (collective).

    Returns:
        The loss in nats per token, and the seconds it took.
    """
    run.model.eval()
    losses = []
    with stopwatch(run.accelerator) as watch:
        for batch in run.eval_loader:
            loss = run.model(**batch).loss.float()
            losses.append(run.accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    run.model.train()
    return torch.cat(losses).mean().item(), watch.seconds


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
                bar.set_postfix(loss=f"{mean_loss:.3f}", grad_norm=f"{grad_norm:.2f}", refresh=False)
                rate = run.scheduler.get_last_lr()[0]
                accelerator.log({"train_loss": mean_loss, "grad_norm": grad_norm, "learning_rate": rate}, step=progress.steps)
            bar.update(1)
            if save_every and progress.steps % save_every == 0:
                save_checkpoint(run, f"step_{progress.steps}")
    micro_steps = progress.micro_steps_in_epoch - first_micro_step
    tokens = micro_steps * args.per_device_train_batch_size * args.block_size * accelerator.num_processes
    train_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item() if losses else float("nan")
    if progress.micro_steps_in_epoch >= run.plan.micro_steps_per_epoch:
        progress.next_epoch()
    return EpochRecord(train_loss, watch.seconds, tokens)


def train(run: Run) -> list[EpochRecord]:
    """Train and evaluate epoch after epoch until the planned number of steps."""
    accelerator, progress = run.accelerator, run.progress
    bar = tqdm(
        total=run.plan.max_train_steps,
        initial=progress.steps,
        desc="train",
        file=sys.stdout,
        disable=not accelerator.is_main_process,
        mininterval=0.2 if sys.stdout.isatty() else 10.0,  # seconds; a log file needs no animation
    )
    records = []
    while progress.steps < run.plan.max_train_steps:
        record = train_epoch(run, bar)
        record.eval_loss, record.eval_seconds = evaluate(run)
        records.append(record)
        perplexity, speed = to_perplexity(record.eval_loss), record.tokens / record.train_seconds
        if accelerator.is_main_process:
            line = f"step {progress.steps}: perplexity {perplexity:,.1f}, train loss {record.train_loss:.3f}, {speed:,.0f} tokens/s"
            bar.write(line, file=sys.stdout)
        metrics = {"perplexity": perplexity, "eval_loss": record.eval_loss, "epoch_train_loss": record.train_loss}
        times = {"train_seconds": record.train_seconds, "eval_seconds": record.eval_seconds, "tokens_per_second": speed}
        accelerator.log(metrics | times, step=progress.steps)
        if run.args.checkpointing_steps == "epoch":
            save_checkpoint(run, f"epoch_{progress.epoch}")
    bar.close()
    return records


def save_checkpoint(run: Run, name: str) -> None:
    """Save everything a resumed run needs under ``output_dir/name`` (collective)."""
    folder = Path(run.args.output_dir) / name
    run.accelerator.save_state(str(folder))
    if run.accelerator.is_main_process:
        run.progress.save(folder)
    run.accelerator.wait_for_everyone()


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


@torch.no_grad()
def loss_of_first_block(model: torch.nn.Module, run: Run) -> float:
    """Loss of ``model`` on the first evaluation sequence; with the engine itself a collective."""
    batch = default_data_collator([run.eval_loader.dataset[0]])
    model.eval()
    return model(**{name: tensor.to(run.accelerator.device) for name, tensor in batch.items()}).loss.item()


def reload_and_generate(run: Run, tokenizer: PreTrainedTokenizerBase, engine_loss: float) -> None:
    """Load the saved folder as any user would, compare it with the trained model and let it continue the prompt.

    Args:
        run: Names the folder and the prompt.
        tokenizer: Encodes the prompt.
        engine_loss: What the trained model said in `loss_of_first_block`.
    """
    # As long as a stage-3 configuration is registered, from_pretrained builds shards and waits for the other ranks.
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    model = AutoModelForCausalLM.from_pretrained(run.args.output_dir).to(run.accelerator.device)
    loss = loss_of_first_block(model, run)
    print(f"\nThe model lies in {run.args.output_dir}. Reloaded with from_pretrained: loss {loss:.4f} on the first evaluation sequence")
    print(f"(in training: {engine_loss:.4f}). It continues {run.args.prompt!r}:")
    prompt = tokenizer(run.args.prompt, return_tensors="pt", return_token_type_ids=False).to(run.accelerator.device)
    room = run.args.block_size - prompt["input_ids"].shape[1]  # a small model has no positions beyond its block
    length = {name: max(1, min(GENERATED_TOKENS, room)) for name in ("min_new_tokens", "max_new_tokens")}
    torch.manual_seed(run.args.seed)
    output = model.generate(**prompt, **length, do_sample=True, top_k=20, pad_token_id=tokenizer.eos_token_id)
    line = str(tokenizer.decode(output[0], skip_special_tokens=True))
    print("    " + " ".join(line.split()))


def push(run: Run) -> None:
    """Upload the saved model to the hub."""
    from huggingface_hub import HfApi

    api, folder = HfApi(token=run.args.hub_token), Path(run.args.output_dir)
    repo = api.create_repo(run.args.hub_model_id or folder.name, exist_ok=True).repo_id
    api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=["step_*", "epoch_*", "wandb/*", "*.partial"])
    print(f"Uploaded to {repo}.")


def report(run: Run, facts: RunFacts, records: list[EpochRecord]) -> None:
    """Print the table and write ``results.json`` (collective)."""
    accelerator = run.accelerator
    seconds = sum(record.train_seconds for record in records)
    results = RunResults(
        train_seconds_per_epoch=seconds / len(records),
        eval_seconds_per_epoch=sum(record.eval_seconds for record in records) / len(records),
        tokens_per_second=sum(record.tokens for record in records) / seconds,
        peak_memory_bytes=maximum_over_ranks(peak_memory_bytes(accelerator.device), accelerator),
        state_bytes=maximum_over_ranks(measured_state_bytes(run.model, run.optimizer), accelerator),
        train_loss=records[-1].train_loss,
        perplexity_before=run.progress.perplexity_before,
        perplexity=to_perplexity(records[-1].eval_loss),
        steps=run.progress.steps,
    )
    if accelerator.is_main_process:
        wide_console().print(results_table([(facts, results)]))
        if run.args.output_dir:
            write_results(Path(run.args.output_dir) / "results.json", facts, results)


def main() -> None:
    """Run the program."""
    args = parse_arguments()
    accelerator = build_accelerator(args)
    run, tokenizer = build_run(accelerator, args)
    facts = describe(run)
    if accelerator.is_main_process:
        wide_console().print(start_panel(facts, measured_state_bytes(run.model, run.optimizer)))
    if args.with_tracking:
        accelerator.init_trackers("clm_no_trainer", vars(args), tracker_options(args))
    if args.resume_from_checkpoint:
        load_checkpoint(run, Path(args.resume_from_checkpoint))
    elif not args.skip_initial_eval:
        run.progress.perplexity_before = to_perplexity(evaluate(run)[0])
        accelerator.print(f"Perplexity before training: {run.progress.perplexity_before:,.1f}")

    records = train(run)
    if records:
        report(run, facts, records)
    else:
        accelerator.print(f"Nothing to train: {run.progress.steps} of {run.plan.max_train_steps} steps were done already.")
    if args.output_dir:
        save_model(run, tokenizer)
        engine_loss = loss_of_first_block(run.model, run)
        if accelerator.is_main_process:
            reload_and_generate(run, tokenizer, engine_loss)
            if args.push_to_hub:
                push(run)
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
