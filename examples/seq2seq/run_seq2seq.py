"""The same task on transformers' Seq2SeqTrainer; ``--deepspeed`` names the DeepSpeed JSON, and without it Trainer runs DDP.

    torchrun --nproc_per_node 2 examples/seq2seq/run_seq2seq.py \
        --deepspeed examples/seq2seq/zero3.json --output_dir runs/chat_trainer --num_train_epochs 1
    python examples/seq2seq/chat.py runs/chat_trainer
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for common/, which the examples share

import numpy as np
from arguments import add_data_flags, add_generation_flags, add_model_flags, check_data
from common.arguments import told_once
from common.trainer import parse_arguments, report, start, train
from model import build_model
from task import collator, decode, generation_options, load_material, write_chat_file
from transformers import EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

DESCRIPTION = "Train a chatbot with transformers' Seq2SeqTrainer: the flags of run_seq2seq_no_trainer.py for data, model and generation."


@told_once
def main() -> None:
    """Run the program."""
    flags = (add_data_flags, add_generation_flags, add_model_flags)
    training, args = parse_arguments(Seq2SeqTrainingArguments, DESCRIPTION, flags, check_data)
    training.predict_with_generate = True
    material = load_material(args, start(training, args, "tokenizer_name", "dataset_name"))
    tokenizer = material.tokenizer

    def compute_metrics(found: EvalPrediction) -> dict[str, float]:
        # Trainer pads what the ranks generated to one length with -100.
        texts = [
            decode(tokenizer, np.where(tokens == -100, tokenizer.pad_token_id, tokens)) for tokens in (found.predictions, found.label_ids)
        ]
        return material.metric.compute(predictions=texts[0], references=texts[1])

    set_seed(training.seed)
    trainer = Seq2SeqTrainer(
        model=build_model(material.config, tokenizer, args),
        args=training,
        train_dataset=material.data[0],
        eval_dataset=material.data[1],
        data_collator=collator(tokenizer, args, half=training.bf16 or training.fp16),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    # BlenderBot takes any keyword and ignores num_items_in_batch: Trainer would multiply its mean loss by the number of ranks.
    trainer.model_accepts_loss_kwargs = False
    clock = train(trainer)
    trainer.save_model()
    metrics = trainer.evaluate(**generation_options(args))
    if training.process_index == 0:
        write_chat_file(args)
    judged = {"bleu": metrics["eval_bleu"], "eval_loss": metrics["eval_loss"]}
    sample = f"sources of at most {args.max_source_length} tokens, targets of at most {args.max_target_length}"
    report(trainer, clock, title="sequence to sequence", sample=sample, metrics=judged, eval_seconds=metrics["eval_runtime"])


if __name__ == "__main__":
    main()
