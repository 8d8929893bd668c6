"""A Trainer script as users write it, which the recipes of ``hf-zero recipes`` start: a causal model and rows of tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

ROWS, LENGTH = 16, 16


@dataclass
class Words:
    model_name_or_path: str = field(metadata={"help": "folder of a model"})


def main() -> None:
    args, words = HfArgumentParser((TrainingArguments, Words)).parse_args_into_dataclasses()  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(words.model_name_or_path, attn_implementation="sdpa", dtype=torch.float32)
    ids = torch.randint(3, model.config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    trainer.save_model(args.output_dir)
    if trainer.accelerator.is_main_process:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        engine = trainer.model_wrapped
        config = engine.config
        print("REPORT", json.dumps({"losses": losses, "stage": engine.zero_optimization_stage(), "config": config}, default=str))


if __name__ == "__main__":
    main()
