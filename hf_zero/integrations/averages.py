"""Define a callback for Trainer that averages the weights: ``Trainer(callbacks=[AveragedWeightsCallback(decay=0.999)])``."""

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
from hf_zero.integrations import callers, methods

FOLDER = "averaged"
"""Folder inside each checkpoint of Trainer with the model that has the averages for weights."""


class AveragedWeightsCallback(TrainerCallback):  # type: ignore[misc]
    """Average the weights after each optimizer step of a Trainer, and evaluate and save with the averages.

    Trainer's checkpoints hold the average itself (in the engine's files), so a resumed run goes on with it.

    Args:
        decay: Decay of the exponential average, a number or a function of the update count; None for the mean of all updates (SWA).
            This argument and the next four are passed to ``hf_zero.utils.AveragedWeights``.
        warm_up: Whether the decay is limited to (1 + updates) / (10 + updates), so that the average leaves the first weights early.
        update_every: Optimizer steps between two updates of the average.
        use_buffers: Whether the model's buffers are averaged too.
        device: Device of the averages; None for the device of the fp32 masters.
        start: Optimizer steps before the first update of the average.
        evaluate: Whether ``evaluate`` and ``predict``, generation included, run with the averages.
        save: Whether each checkpoint gets a folder "averaged" with the averaged model as ``save_model`` writes it.
        keep: Whether the averages replace the model's weights at the end of training, so that ``save_model`` writes them.

    Attributes:
        averages: The averages; None before training begins.
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
        """Create the averages of the engine that trains.

        Raises:
            UnsupportedError: Trainer does not train with an engine of hf_zero.
        """
        self.averages = AveragedWeights(_trainer().model_wrapped, **self._arguments)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the averages with the weights after an optimizer step."""
        if self.averages is not None and state.global_step > self._start:
            self.averages.update()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the averaged model into the folder of the checkpoint that Trainer saves."""
        if self.averages is not None and self._saves and self.averages.updates:
            folder = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", FOLDER)
            with self.averages.applied():
                _trainer().save_model(folder, _internal_call=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replace the model's weights by the averages if ``keep`` was set."""
        if self.averages is not None and self._keeps and self.averages.updates:
            self.averages.copy_to_weights()

    def around_evaluation(self) -> AbstractContextManager[Any]:
        """Return a context in which the model has the averaged weights for an evaluation; it does nothing before the first update."""
        averages = self.averages
        applies = averages is not None and self._evaluates and averages.updates and averages.usable
        return averages.applied() if averages is not None and applies else nullcontext()


def _trainer() -> Any:
    call = next(iter(callers.running(methods.TRAIN)), None)
    if call is None or not isinstance(getattr(call.caller, "model_wrapped", None), Engine):
        raise UnsupportedError(
            "AveragedWeightsCallback averages the shards of an engine of hf_zero, but this Trainer trains without one. Pass "
            "TrainingArguments(deepspeed=...), or average an unsharded model with torch.optim.swa_utils.AveragedModel"
        )
    return call.caller
