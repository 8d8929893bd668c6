"""Do the same task with transformers' Seq2SeqTrainer; ``--deepspeed`` names the DeepSpeed JSON file, without it Trainer uses DDP.

    torchrun --nproc_per_node 2 examples/seq2seq/run_seq2seq.py \
        --deepspeed examples/seq2seq/zero3.json --output_dir runs/chat_trainer --num_train_epochs 1
    python examples/seq2seq/chat.py runs/chat_trainer
"""

from __future__ import annotations

from functools import partial

import numpy as np
from arguments import add_data_flags, add_generation_flags, add_model_flags, check_data
from flags import checkpoint_to_resume, say, settle, told_once
from model import build_model
from offline import check_offline
from task import collator, decode, generation_options, load_material, write_chat_file
from transformers import EvalPrediction, HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed


@told_once
def main() -> None:
    """Run the script."""
    parser = HfArgumentParser(Seq2SeqTrainingArguments, description="Train a chatbot with transformers' Seq2SeqTrainer.")
    add_data_flags(parser)
    add_generation_flags(parser)
    add_model_flags(parser)
    training, args = parser.parse_args_into_dataclasses()
    check_data(parser, args)
    args.output_dir, training.predict_with_generate = training.output_dir, True
    say(check_offline(args, "tokenizer_name", "dataset_name"))
    settle(training)
    material = load_material(args, partial(training.main_process_first, local=False))
    tokenizer = material.tokenizer

    def compute_metrics(found: EvalPrediction) -> dict[str, float]:
        # Trainer pads the generated texts of all ranks to one length with -100.
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
    # BlenderBot accepts any keyword but ignores num_items_in_batch, so Trainer would multiply its mean loss by the number of ranks.
    trainer.model_accepts_loss_kwargs = False
    trained = trainer.train(resume_from_checkpoint=checkpoint_to_resume(training))
    trainer.save_model()
    trainer.save_state()
    for split, metrics in (("train", trained.metrics), ("eval", trainer.evaluate(**generation_options(args)))):
        trainer.log_metrics(split, metrics)  # print a table
        trainer.save_metrics(split, metrics)  # write all_results.json
    if training.process_index == 0:
        write_chat_file(args)


if __name__ == "__main__":
    main()
