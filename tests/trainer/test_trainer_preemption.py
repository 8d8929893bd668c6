"""Signals to Trainer's ranks at awkward moments: one checkpoint of the step that all agree upon, and a resumed run like the whole one."""

from __future__ import annotations

import inspect
import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks, signalled, trainers
from tests.support.versions import TRANSFORMERS_5

TOTAL = 5


@dataclass(frozen=True)
class Case:
    """A signal, and what must come of it.

    Attributes:
        event: The method of a callback in which it is sent ...
        step: ... while Trainer has counted so many steps.
        to: Ranks that get it.
        saved: The step of the checkpoint.
        stage: Of ZeRO.
        options: Training arguments.
        number: Of the signal.
        config: Sections of the configuration.
    """

    event: str
    step: int
    to: tuple[int, ...]
    saved: int
    stage: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    number: int = signal.SIGTERM
    config: dict[str, Any] = field(default_factory=dict)


USR2 = {"hf_zero": {"preemption_signal": "SIGUSR2"}}
BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
CASES = (
    Case("on_substep_end", 1, (1,), 2, options={"enable_jit_checkpoint": True}),
    # The first checkpoint may be the best one: at the end of a training Trainer deletes the last one then.
    Case("on_pre_optimizer_step", 2, (0,), 3, 3, {**BEST, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}),
    Case("on_save", 2, (1,), 2, options={"save_strategy": "steps", "save_steps": 2}),  # while the checkpoint is written
    Case("on_step_begin", 2, (0,), 3, 2, {"save_strategy": "epoch", "eval_strategy": "epoch", "save_only_model": True}),  # 3 steps an epoch
    Case("on_evaluate", 2, (1,), 3, 3, {"eval_strategy": "steps", "eval_steps": 2}, signal.SIGUSR2, USR2),
    Case("on_step_begin", 3, (1,), 4, 2, {**BEST, "save_strategy": "best", "save_total_limit": 2, "metric_for_best_model": "eval_loss"}),
)


def _trainer(models: Path, folder: Path, case: Case, callbacks: list[Any]) -> Any:
    from transformers import Trainer

    trainers.forget()
    options = {"max_steps": TOTAL, **case.options}
    args = trainers.arguments(folder, trainers.zero_config(case.stage, **case.config), **options)
    model = trainers.load(models, "gpt2", resid_pdrop=0.1)

    class Own(Trainer):  # TRL has one that calls nothing of what it replaces
        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            inspect.unwrap(Trainer._maybe_log_save_evaluate)(self, *args, **kwargs)

    kind = Own if case.options.get("save_only_model") else Trainer
    return kind(model=model, args=args, train_dataset=trainers.rows(24, 1), eval_dataset=trainers.rows(7, 2), callbacks=callbacks)


def _sender(case: Case) -> Any:
    from transformers import TrainerCallback

    def send(_self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == case.step:
            signalled.send(*case.to, number=case.number)

    return type("Sender", (TrainerCallback,), {case.event: send})()


def _run(models: Path, folder: Path, cases: tuple[Case, ...]) -> None:
    from hf_zero.observe import record_labels

    for number, case in enumerate(cases):
        place = folder / str(number)
        with trainers.clean_state(), signalled.new_process():
            whole = _trainer(models, folder / f"whole{number}", case, [])
            whole.train()
            weights = trainers.weights_of(whole.model)
            whole.model_wrapped.destroy()
        with trainers.clean_state(), signalled.new_process():
            former = signal.getsignal(case.number)
            trainer = _trainer(models, place, case, [_sender(case)])
            with record_labels() as labels:
                assert signalled.preempted(trainer.train), case
            assert case.config or signal.getsignal(case.number) is former
            trainer.model_wrapped.destroy()
        saves = [label for label in labels if "checkpoint_begun" in label]
        kept = place / f"checkpoint-{case.saved}"
        if ranks.rank() == 0:
            assert len(saves) == len(set(saves)) and saves[-1].endswith(f"(global_step{case.saved})"), (case, saves)
            assert json.loads((kept / "trainer_state.json").read_text())["global_step"] == case.saved
            assert (kept / "latest").read_text() == f"global_step{case.saved}"
        with trainers.clean_state(), signalled.new_process():
            resumed = _trainer(models, place, case, [])
            resumed.train(resume_from_checkpoint=str(kept))
            assert trainers.logs_of(resumed) == trainers.logs_of(whole), case
            found = trainers.weights_of(resumed.model)
            assert all(torch.equal(value, found[name]) for name, value in weights.items()), case
            resumed.model_wrapped.destroy()


def _complete(models: Path, folder: Path) -> None:
    """A signal after the last step: it is saved, and the training ends as a complete one does."""
    case = Case("on_step_end", TOTAL, (1,), TOTAL, options={"save_strategy": "steps", "save_steps": 3})
    with trainers.clean_state(), signalled.new_process():
        trainer = _trainer(models, folder, case, [_sender(case)])
        assert trainer.train().global_step == TOTAL
        trainer.model_wrapped.destroy()
    assert (folder / f"checkpoint-{TOTAL}" / "trainer_state.json").exists()


def _few(models: Path, folder: Path) -> None:
    _run(models, folder, CASES[:2] if TRANSFORMERS_5 else CASES[1:2])
    _complete(models, folder / "complete")


def test_preempted_runs_go_on_where_they_stopped(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_few, 2, trainer_models, tmp_path)


@pytest.mark.slow
def test_more_of_them(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_run, 2, trainer_models, tmp_path, CASES[2:])
