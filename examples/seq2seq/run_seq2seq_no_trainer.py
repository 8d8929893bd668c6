"""Train a sequence-to-sequence model with stock Accelerate: one process, DDP, or ZeRO 0-3, as the launcher file selects.

    accelerate launch --config_file examples/seq2seq/accelerate_zero2.yaml examples/seq2seq/run_seq2seq_no_trainer.py --output_dir runs/chat
    python examples/seq2seq/chat.py runs/chat

The script does not depend on the engine. In the same folder: arguments.py (flags), data.py, model.py, README.md (commands).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from arguments import parse_arguments
from flags import FlagError, line_of, say, told_once, trackers
from model import build_model
from offline import check_offline
from task import Material, collator, decode, generation_options, keep_samples, load_material, write_chat_file
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, get_scheduler

# Under ZeRO stage 3 a parameter has shape [0], so recognise biases and norms by name and not by the number of dimensions.
NO_DECAY = ("bias", "ln_", "layer_norm", "layernorm", "norm.")


@dataclass
class Counts:
    """The length of a run."""

    steps: int  # optimizer steps of the whole run
    steps_per_epoch: int
    accumulation: int  # micro-steps per optimizer step


def deepspeed_config(accelerator: Accelerator) -> dict[str, Any]:
    """Return the DeepSpeed configuration that the launcher selected; empty without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return {} if plugin is None else plugin.deepspeed_config


def build_optimizer(args: argparse.Namespace, accelerator: Accelerator, model: Any, steps: int) -> tuple[Any, Any]:
    """Return AdamW and schedule from the flags, or Accelerate's placeholders for those that the DeepSpeed configuration has."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]  # the first decays as the flag or the JSON says
    for name, parameter in model.named_parameters():
        groups[any(mark in name.lower() for mark in NO_DECAY)]["params"].append(parameter)
    held, ranks = deepspeed_config(accelerator).keys() & {"optimizer", "scheduler"}, accelerator.num_processes
    if not held:  # Accelerate advances the schedule once per rank and step
        optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, weight_decay=args.weight_decay)
        return optimizer, get_scheduler(args.lr_scheduler_type, optimizer, args.num_warmup_steps * ranks, steps * ranks)
    from accelerate.utils import DummyOptim, DummyScheduler  # exist if Accelerate finds DeepSpeed or hf_zero

    kind = DummyOptim if "optimizer" in held else torch.optim.AdamW
    optimizer = kind(groups, lr=args.learning_rate, weight_decay=args.weight_decay)
    if "scheduler" in held:  # Accelerate divides the total by the number of ranks
        return optimizer, DummyScheduler(optimizer, total_num_steps=steps * ranks, warmup_num_steps=args.num_warmup_steps)

    def by_flags(inner: Any) -> Any:
        return get_scheduler(args.lr_scheduler_type, inner, args.num_warmup_steps, steps)

    return optimizer, DummyScheduler(optimizer, lr_scheduler_callable=by_flags)


def in_sixteen_bit(accelerator: Accelerator) -> bool:
    """Return whether the run uses 16-bit numbers, so that batches get lengths for tensor cores; a DeepSpeed configuration decides."""
    sections = [deepspeed_config(accelerator).get(name) or {} for name in ("bf16", "fp16")]
    return accelerator.mixed_precision != "no" or any(str(section.get("enabled")).lower() == "true" for section in sections)


@torch.no_grad()
def evaluate(args: argparse.Namespace, accelerator: Accelerator, model: Any, loader: Any, material: Material) -> dict[str, float]:
    """Return BLEU of the generated texts and mean loss of the targets over all ranks, and keep samples; collective."""
    model.eval()
    stage = int((deepspeed_config(accelerator).get("zero_optimization") or {}).get("stage", 0))
    options = generation_options(args) | {"synced_gpus": stage == 3 and accelerator.num_processes > 1}  # until all ranks have finished
    losses, rows, pad = [], [], material.tokenizer.pad_token_id
    for index, batch in enumerate(loader):
        loss = model(**batch).loss.float()
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["labels"]))))
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        generated = accelerator.unwrap_model(model).generate(**inputs, **options)
        padded = [accelerator.pad_across_processes(ids, dim=1, pad_index=pad) for ids in (generated, batch["labels"], batch["input_ids"])]
        texts = [decode(material.tokenizer, tokens.cpu()) for tokens in accelerator.gather_for_metrics(tuple(padded))]
        material.metric.add_batch(predictions=texts[0], references=texts[1])
        if index < args.n_val_batch_generations:
            rows += zip(texts[2], texts[0], texts[1], strict=True)
    model.train()
    keep_samples(args, accelerator, rows)
    return {"bleu": material.metric.compute()["bleu"], "eval_loss": torch.cat(losses).mean().item()}


def save_checkpoint(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Save the state that a resumed run needs; collective. The step is written last and marks the checkpoint as complete."""
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / "progress.partial").write_text(json.dumps({"steps": step}), encoding="utf-8")
        (folder / "progress.partial").rename(folder / "progress.json")
    accelerator.wait_for_everyone()


def load_checkpoint(args: argparse.Namespace, accelerator: Accelerator) -> int:
    """Load the checkpoint of --resume_from_checkpoint and return its number of optimizer steps; collective."""
    found = [Path(args.resume_from_checkpoint or "", "progress.json")]
    if args.resume_from_checkpoint == "latest":
        found = list(Path(args.output_dir).glob("*/progress.json"))
    if not args.resume_from_checkpoint or not found:
        say(f"No checkpoint in {args.output_dir} yet, beginning at the start." if args.resume_from_checkpoint else "")
        return 0
    if not found[0].is_file():
        raise FlagError(f"--resume_from_checkpoint {found[0].parent}: give a step_N or epoch_N folder of an earlier run, or 'latest'.")
    steps, folder = max((int(json.loads(path.read_text(encoding="utf-8"))["steps"]), path.parent) for path in found)
    accelerator.load_state(str(folder))
    say(f"Resumed from {folder}: {steps} steps are done.")
    return steps


def train(args: argparse.Namespace, accelerator: Accelerator, prepared: Any, counts: Counts, material: Material) -> dict[str, Any]:
    """Train, evaluate after each epoch, and return the measurements for results.json; collective."""
    model, optimizer, train_loader, eval_loader, scheduler = prepared
    results: dict[str, Any] = asdict(counts) | {"before": {}, "log": [], "epochs": []}
    steps = load_checkpoint(args, accelerator)
    if steps == 0 and not args.skip_initial_eval:
        results["before"] = evaluate(args, accelerator, model, eval_loader, material)
        say(f"Before training: {line_of(results['before'])}")
    save_every = int(args.checkpointing_steps) if (args.checkpointing_steps or "").isdigit() else None
    bar = tqdm(total=counts.steps, initial=steps, desc="train", disable=not (accelerator.is_main_process and sys.stdout.isatty()))
    while steps < counts.steps:
        epoch, done = divmod(steps, counts.steps_per_epoch)
        train_loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(train_loader, done * counts.accumulation) if done else train_loader
        began, first, losses, parts, norm = time.perf_counter(), steps, [], [], math.nan
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.max_grad_norm > 0:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            parts.append(loss.detach().float())
            if not accelerator.sync_gradients:
                continue
            steps += 1
            losses.append(torch.stack(parts).mean())
            parts = []
            if steps % args.logging_steps == 0:
                entry = {"train_loss": accelerator.reduce(losses[-1], reduction="mean").item()}
                entry |= {"grad_norm": math.nan if norm is None else float(norm), "learning_rate": scheduler.get_last_lr()[0]}
                results["log"].append({"step": steps} | entry)
                accelerator.log(entry, step=steps)
                bar.set_postfix_str(line_of(entry), refresh=False)
                say(f"step {steps}/{counts.steps}  {line_of(entry)}" if not sys.stdout.isatty() else "")
            bar.update()
            if save_every and steps % save_every == 0:
                save_checkpoint(accelerator, Path(args.output_dir, f"step_{steps}"), steps)
            if steps == counts.steps:
                break
        metrics = {"epoch_train_loss": accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()}
        trained = time.perf_counter()
        metrics |= evaluate(args, accelerator, model, eval_loader, material)
        times = {"train_seconds": trained - began, "eval_seconds": time.perf_counter() - trained}
        results["epochs"].append({"steps": steps - first} | metrics | times)
        accelerator.log(metrics | times, step=steps)
        say(f"\nstep {steps}: {line_of(metrics | times)}")
        if args.checkpointing_steps == "epoch":
            save_checkpoint(accelerator, Path(args.output_dir, f"epoch_{epoch + 1}"), steps)
    bar.close()
    return results


@torch.no_grad()
def answer_from_folder(args: argparse.Namespace, sample: dict[str, Any]) -> None:
    """Write the chat's settings, load the saved folder with from_pretrained, and answer the first evaluation sample."""
    write_chat_file(args)
    tokenizer, model = (kind.from_pretrained(args.output_dir) for kind in (AutoTokenizer, AutoModelForSeq2SeqLM))
    inputs = {name: torch.tensor([sample[name]]) for name in ("input_ids", "attention_mask")}
    answer = model.eval().generate(**inputs, **generation_options(args))
    prompt, text = decode(tokenizer, inputs["input_ids"])[0], decode(tokenizer, answer)[0]
    print(f"\nThe model lies in {args.output_dir}. Reloaded with from_pretrained it answers\n    {prompt}\nwith\n    {text}")


@told_once
def main() -> None:
    """Run the script."""
    args = parse_arguments()
    say(check_offline(args, "tokenizer_name", "dataset_name"))
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=trackers(args),
        project_dir=args.output_dir,
        # The order of batches depends only on the epoch's number, so a resumed run continues with the next batches.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    material = load_material(args, accelerator.main_process_first)
    train_data, eval_data = material.data
    set_seed(args.seed)
    model = build_model(material.config, material.tokenizer, args)
    set_seed(args.seed, device_specific=True)  # from here on, dropout differs between ranks
    config, batch_size = deepspeed_config(accelerator), args.per_device_train_batch_size
    accumulation = config.get("gradient_accumulation_steps")
    accumulation = accumulation if isinstance(accumulation, int) else accelerator.gradient_accumulation_steps
    micro_steps = math.ceil(math.ceil(len(train_data) / batch_size) / accelerator.num_processes)
    per_epoch = math.ceil(micro_steps / accumulation)
    counts = Counts(args.max_train_steps or args.num_train_epochs * per_epoch, per_epoch, accumulation)
    say(f"{len(train_data):,} samples to train, {len(eval_data)} to evaluate; {counts.steps} steps on {accelerator.num_processes} ranks")
    if config.get("train_micro_batch_size_per_gpu") == "auto":
        config["train_micro_batch_size_per_gpu"] = batch_size  # else Accelerate uses the smaller batch size of the two loaders
    options = {
        "collate_fn": collator(material.tokenizer, args, half=in_sixteen_bit(accelerator)),
        "generator": torch.Generator().manual_seed(args.seed),
    }
    train_loader: Any = DataLoader(train_data, batch_size, shuffle=True, **options)
    eval_loader: Any = DataLoader(eval_data, args.per_device_eval_batch_size, **options)
    optimizer, scheduler = build_optimizer(args, accelerator, model, counts.steps)
    prepared = accelerator.prepare(model, optimizer, train_loader, eval_loader, scheduler)
    if args.with_tracking:
        accelerator.init_trackers(args.report_name, vars(args), {"wandb": {"dir": args.output_dir}})
    results = train(args, accelerator, prepared, counts, material)
    if args.output_dir:
        model = accelerator.unwrap_model(prepared[0])
        weights = accelerator.get_state_dict(prepared[0])  # collective: at stage 3 every rank sends its shards
        model.save_pretrained(args.output_dir, is_main_process=accelerator.is_main_process, state_dict=weights)
        if accelerator.is_main_process:
            material.tokenizer.save_pretrained(args.output_dir)
            Path(args.output_dir, "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            # While a stage 3 configuration is registered, from_pretrained builds shards and waits for the other ranks; unregister it.
            transformers.integrations.deepspeed.unset_hf_deepspeed_config()
            answer_from_folder(args, eval_data[0])
    del model, prepared
    accelerator.free_memory()  # free a DDP model before its process group, else it may wait forever for a gloo thread
    accelerator.end_training()


if __name__ == "__main__":
    main()
