"""A callback for Trainer that averages the weights: ``Trainer(callbacks=[AveragedWeightsCallback(decay=0.999)])``."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_zero.core.averages import AveragedWeights
from hf_zero.core.engine import Engine
from hf_zero.errors import UnsupportedError
from hf_zero.integrations import callers

FOLDER = "averaged"
"""Folder inside each checkpoint of Trainer with the model that has the averages for weights."""


class AveragedWeightsCallback(TrainerCallback):  # type: ignore[misc]
    """Average the weights after each optimizer step, and evaluate and save with the averages.

    Trainer's checkpoints hold the average itself (in the engine's files), so a resumed run goes on with it.

    Args:
        decay: As of ``hf_zero.utils.AveragedWeights``: of an exponential average, or None for the mean of all updates (SWA).
        warm_up: As there.
        update_every: As there, in optimizer steps.
        use_buffers: As there.
        device: As there.
        start: Optimizer steps before the first update.
        evaluate: ``evaluate`` and ``predict``, generation included, run with the averages.
        save: Beside the weights that are trained, each checkpoint gets a folder "averaged" with the model as ``save_model`` writes it.
        keep: At the end of the training the averages become the model's weights, which ``save_model`` then writes.

    Attributes:
        averages: The average; None before the training begins.
    """

    def __init__(
        self,
        decay: float | Callable[[int], float] | None = 0.999,
        *,
        warm_up: bool = False,
        update_every: int = 1,
        use_buffers: bool = False,
        device: torch.device | str | None = None,
        start: int = 0,
        evaluate: bool = True,
        save: bool = True,
        keep: bool = False,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "decay": decay,
            "warm_up": warm_up,
            "update_every": update_every,
            "use_buffers": use_buffers,
            "device": device,
        }
        self._start, self._evaluates, self._saves, self._keeps = start, evaluate, save, keep
        self.averages: AveragedWeights | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes the average of the engine that trains.

        Raises:
            UnsupportedError: No engine of hf_zero trains.
        """
        self.averages = AveragedWeights(_trainer().model_wrapped, **self._arguments)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the weights of an optimizer step into the average."""
        if self.averages is not None and state.global_step > self._start:
            self.averages.update()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the model with the averages beside a checkpoint."""
        if self.averages is not None and self._saves and self.averages.updates:
            folder = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", FOLDER)
            with self.averages.applied():
                _trainer().save_model(folder, _internal_call=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leaves the averages in the model, where that is asked for."""
        if self.averages is not None and self._keeps and self.averages.updates:
            self.averages.copy_to_weights()

    def around_evaluation(self) -> AbstractContextManager[Any]:
        """Put the averages in the place of the weights for an evaluation, once there are any."""
        averages = self.averages
        applies = averages is not None and self._evaluates and averages.updates and averages.usable
        return averages.applied() if averages is not None and applies else nullcontext()


def _trainer() -> Any:
    call = next(iter(callers.running(callers.TRAIN)), None)
    if call is None or not isinstance(getattr(call.caller, "model_wrapped", None), Engine):
        raise UnsupportedError(
            "AveragedWeightsCallback averages the shards of an engine of hf_zero, and none trains here: give "
            "TrainingArguments(deepspeed=...), or average a model that is whole with torch.optim.swa_utils.AveragedModel"
        )
    return call.caller
