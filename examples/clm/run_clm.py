"""Do the same task with transformers' Trainer; ``--deepspeed`` names the DeepSpeed JSON file, without it Trainer uses DDP.

torchrun --nproc_per_node 2 examples/clm/run_clm.py --deepspeed examples/clm/zero3.json --output_dir runs/clm_trainer --max_steps 320
"""

from __future__ import annotations

import math
from functools import partial

from arguments import add_data_flags, add_model_flags, check_data
from flags import checkpoint_to_resume, say, settle, told_once
from model import build_model
from offline import check_offline
from task import load_material
from transformers import HfArgumentParser, Trainer, TrainingArguments, default_data_collator, set_seed


@told_once
def main() -> None:
    """Run the script."""
    parser = HfArgumentParser(TrainingArguments, description="Train a language model with transformers' Trainer.")
    add_data_flags(parser)
    add_model_flags(parser)
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
