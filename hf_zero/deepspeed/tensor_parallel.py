"""DeepSpeed's switch between tensor parallelism for training and for inference, which scripts turn before they build a model."""

from __future__ import annotations


def set_autotp_mode(training: bool = False) -> None:
    """Accepted: a model is split after it was built, for training; nothing has to be prepared before."""


def is_autotp_training_mode() -> bool:
    """True: there is no other mode."""
    return True
