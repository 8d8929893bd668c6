"""A Trainer run under tensor parallelism, for ``test_tp_trainer.py``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.errors import StateError
from tests.support.models import CASES, LENGTH, VOCAB


def rows(count: int = 32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = [torch.randint(3, VOCAB, (LENGTH,), generator=generator) for _ in range(count)]
    return [{"input_ids": tokens, "labels": tokens.clone()} for tokens in found]


def arguments(folder: str, config: dict[str, Any] | None, **extra: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=extra.pop("batch", 2),
        max_steps=extra.pop("max_steps", 4),
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy=extra.pop("save_strategy", "no"),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        deepspeed=config,
        **extra,
    )


def zero_config(stage: int, tp: int) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage} | ({"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}),
        "tensor_parallel": {"autotp_size": tp},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
    }


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer: Any) -> list[float]:
    return [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


EVALUATED = 9  # rows: no multiple of the rows that the ranks evaluate at once


def counts_of(trainer: Any) -> tuple[float, ...]:
    """Return operations, parameters and bytes that transformers counts."""
    model = trainer.model
    few = model.num_parameters(only_trainable=True, exclude_embeddings=True)
    return trainer.state.total_flos, model.num_parameters(), few, model.get_memory_footprint()


def train_and_save(stage: int, tp: int, folder: str) -> tuple[list[float], list[float], float, Any, tuple[float, ...]]:
    """Return losses, norms, evaluation loss, predictions and counts; save the model in ``folder``."""
    from transformers import Trainer

    with tempfile.TemporaryDirectory() as own:
        args = arguments(own, zero_config(stage, tp))
        model = CASES["gpt2"].build() if stage < 3 else built_sharded()
        trainer = Trainer(model=model, args=args, train_dataset=rows(), eval_dataset=rows(EVALUATED))
        trainer.train()
        found = losses(trainer), norms(trainer)
        evaluated = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(rows(EVALUATED)).predictions
        with pytest.raises(StateError, match="this rank has only slices of the model"):
            trainer.model.save_pretrained(folder)
        trainer.save_model(folder)
        dist.barrier()
        counts = counts_of(trainer)
    return (*found, evaluated, predicted, counts)


def built_sharded() -> Any:
    """Return the same model, built sharded over all ranks."""
    import hf_zero

    whole = CASES["gpt2"].build()
    with hf_zero.zero.Init():
        model = CASES["gpt2"].build()
    with hf_zero.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        for param, value in zip(model.parameters(), whole.parameters(), strict=True):
            param.copy_(value)
    return model


def resume(stage: int, tp: int, saved_with: int, folder: str) -> tuple[list[float], list[float]]:
    """Return the losses of an uninterrupted run over ``saved_with`` ranks, and of one that is resumed half-way over ``tp`` ranks.

    Both use the same rows per step: transformers 4 takes the batch size per device from the checkpoint, so the accumulation differs.
    """
    from transformers import Trainer

    def trainer(ranks_together: int, seed: int, **options: Any) -> Any:
        args = arguments(folder, zero_config(stage, ranks_together), max_steps=4, gradient_accumulation_steps=ranks_together, **options)
        return Trainer(model=CASES["gpt2"].build(seed=seed), args=args, train_dataset=rows())

    whole = trainer(saved_with, 0, save_strategy="steps", save_steps=2)
    whole.train()
    dist.barrier()
    again = trainer(tp, 9)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    return losses(whole), losses(again)


def generated(folder: str, config: dict[str, Any]) -> tuple[int, Any]:
    """Return the number of rows that a sequence-to-sequence Trainer counts, and its generated tokens."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    args = Seq2SeqTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        max_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=4,
        deepspeed=config,
    )
    trainer = Seq2SeqTrainer(
        model=CASES["t5"].build(), args=args, train_dataset=rows(), compute_metrics=lambda found: {"rows": len(found[0])}
    )
    trainer.train()
    found = trainer.predict(rows(6))
    return found.metrics["test_rows"], found.predictions
