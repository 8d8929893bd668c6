"""sentence-transformers' own trainer on pairs of texts, with in-batch negatives, like its examples."""

import sys
from pathlib import Path

import torch
from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import HfArgumentParser


def main():
    model_path, data, *words = sys.argv[1:]
    (args,) = HfArgumentParser(SentenceTransformerTrainingArguments).parse_args_into_dataclasses(words)
    torch.manual_seed(0)
    body = Transformer(model_path)
    model = SentenceTransformer(modules=[body, Pooling(body.get_word_embedding_dimension())])
    pairs = load_dataset("json", data_files={"train": str(Path(data) / "train.jsonl")})["train"]
    judged = {"eval_dataset": pairs} if args.load_best_model_at_end else {}
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=pairs, loss=loss, **judged)
    trainer.train()
    trainer.save_model(str(Path(args.output_dir) / "final"))


if __name__ == "__main__":
    main()
