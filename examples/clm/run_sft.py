"""Fine-tune on instructions and answers with transformers' Trainer, under ZeRO, tensor parallelism or both, as the JSON file selects.

    torchrun --nproc_per_node 4 examples/clm/run_sft.py --deepspeed examples/clm/sft/zero1_tp.json --output_dir runs/sft \
        --per_device_train_batch_size 16 --learning_rate 1e-3 --max_steps 40

With ``"tensor_parallel": {"autotp_size": 2}`` on four ranks there are two copies of the model, so the global batch is 16 x 2.
Only the tokens of answers count in the loss.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from arguments import add_data_flags, add_model_flags, check_data
from flags import checkpoint_to_resume, files_first, say, settle, told_once
from model import build_config, build_model, finish_config
from offline import build_tokenizer, check_offline
from sft_data import encode_splits, load_instructions, prompt_of
from task import Material
from transformers import HfArgumentParser, Trainer, TrainingArguments, default_data_collator, set_seed

DESCRIPTION = (
    "Fine-tune a language model on instructions and answers with transformers' Trainer. "
    "With neither --dataset_name nor --train_file it needs no network: it learns what functions do, from Python's docstrings."
)


def load_material(args: argparse.Namespace, first_rank_first: Callable[[], AbstractContextManager[Any]]) -> Material:
    """Load instructions and tokenizer, and build the configuration of the model; arguments as in `task.load_material`."""
    config, note = build_config(args)
    say(note)
    with files_first(args, first_rank_first):
        raw = load_instructions(args)
    tokenizer = build_tokenizer(args, lambda: [prompt_of(sample) + sample["output"] for sample in raw["train"]])
    with files_first(args, first_rank_first):
        data = encode_splits(raw, tokenizer, args)
    return Material(tokenizer, data, finish_config(config, tokenizer, args))


@told_once
def main() -> None:
    """Run the script."""
    parser = HfArgumentParser(TrainingArguments, description=DESCRIPTION)
    add_data_flags(parser)
    add_model_flags(parser, model_type="llama")
    training, args = parser.parse_args_into_dataclasses()
    check_data(parser, args)
    say(check_offline(args, "tokenizer_name", "dataset_name"))
    settle(training)
    material = load_material(args, partial(training.main_process_first, local=False))

    set_seed(training.seed)
    trainer = Trainer(
        model=build_model(material.config, material.tokenizer, args),
        args=training,
        train_dataset=material.data[0],
        eval_dataset=material.data[1],
        data_collator=default_data_collator,
        processing_class=material.tokenizer,
    )
    trained = trainer.train(resume_from_checkpoint=checkpoint_to_resume(training))
    trainer.save_model()
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["eval_perplexity"] = math.exp(min(metrics["eval_loss"], 700))
    for split, measured in (("train", trained.metrics), ("eval", metrics)):
        trainer.log_metrics(split, measured)  # print a table
        trainer.save_metrics(split, measured)  # write all_results.json


if __name__ == "__main__":
    main()
