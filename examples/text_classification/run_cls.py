"""Do the same task with transformers' Trainer; ``--deepspeed`` names the DeepSpeed JSON file, without it Trainer uses DDP.

    torchrun --nproc_per_node 2 examples/text_classification/run_cls.py \
        --deepspeed examples/text_classification/zero3.json --output_dir runs/cls_trainer --num_train_epochs 3
"""

from __future__ import annotations

from functools import partial

from arguments import add_data_flags, add_model_flags, check_data
from flags import checkpoint_to_resume, say, settle, told_once
from model import build_model
from offline import check_offline
from task import collator, load_material
from transformers import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed


@told_once
def main() -> None:
    """Run the script."""
    parser = HfArgumentParser(TrainingArguments, description="Train a text classifier with transformers' Trainer.")
    add_data_flags(parser)
    add_model_flags(parser)
    training, args = parser.parse_args_into_dataclasses()
    check_data(parser, args)
    say(check_offline(args, "tokenizer_name", "task_name"))
    settle(training)
    material = load_material(args, partial(training.main_process_first, local=False))

    def compute_metrics(found: EvalPrediction) -> dict[str, float]:
        return material.metric.compute(predictions=found.predictions.argmax(axis=-1), references=found.label_ids)

    set_seed(training.seed)
    trainer = Trainer(
        model=build_model(material.config, args),
        args=training,
        train_dataset=material.data[0],
        eval_dataset=material.data[1],
        data_collator=collator(material.tokenizer, args, half=training.bf16 or training.fp16),
        processing_class=material.tokenizer,
        compute_metrics=compute_metrics,
    )
    trained = trainer.train(resume_from_checkpoint=checkpoint_to_resume(training))
    trainer.save_model()
    trainer.save_state()
    for split, metrics in (("train", trained.metrics), ("eval", trainer.evaluate())):
        trainer.log_metrics(split, metrics)  # print a table
        trainer.save_metrics(split, metrics)  # write all_results.json


if __name__ == "__main__":
    main()
