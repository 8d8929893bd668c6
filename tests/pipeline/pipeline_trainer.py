"""A Trainer run over a pipeline, for ``test_pipeline_trainer.py``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.models import CASES
from tests.support.tp_trainer import EVALUATED, arguments, losses, norms, rows, zero_config


def config(stage: int, stages: int, tp: int = 1, **section: Any) -> dict[str, Any]:
    """A configuration with ``stages``; 1 is none."""
    found = zero_config(stage, tp)
    return {**found, "pipeline": {"stages": stages, **section}} if stages > 1 else found


def train_and_save(stage: int, stages: int, tp: int, folder: str, **options: Any) -> tuple[list[float], list[float], int, float, Any, Any]:
    """Losses, norms, tokens seen, evaluation loss, predictions and what is generated; the saved model is in ``folder``."""
    from transformers import Trainer

    with tempfile.TemporaryDirectory() as own:
        args = arguments(own, config(stage, stages, tp), include_num_input_tokens_seen="all", **options)
        model = CASES["gpt2"].build()
        trainer = Trainer(model=model, args=args, train_dataset=rows(), eval_dataset=rows(EVALUATED))
        trainer.train()
        found = losses(trainer), norms(trainer), trainer.state.num_input_tokens_seen
        evaluated = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(rows(EVALUATED)).predictions
        tokens = torch.stack([row["input_ids"] for row in rows(2)])
        written = trainer.model.eval().generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
        trainer.save_model(folder)
        dist.barrier()
    return (*found, evaluated, predicted, written.tolist())


def resume(stages: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses of an uninterrupted run, and of one that is resumed half-way over the same stages."""
    from transformers import Trainer

    def trainer(seed: int, **options: Any) -> Any:
        args = arguments(folder, config(1, stages), max_steps=4, **options)
        return Trainer(model=CASES["gpt2"].build(seed=seed), args=args, train_dataset=rows())

    whole = trainer(0, save_strategy="steps", save_steps=2)
    whole.train()
    dist.barrier()
    again = trainer(9)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    return losses(whole), losses(again)
