"""Hold the user's choices for the model of a plan; without imports of torch, because flags are checked before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelWish:
    """The user's choices for the model.

    Attributes:
        name: A folder or file with a config.json, an ID on the Hub, a ``model_type``, or ``python:FILE.py:FUNCTION``.
        settings: Values that replace keys of the model's configuration.
        attention: sdpa, flash or eager.
        trainable: ``all``, or ``lora:`` with r=, alpha= and targets=, or ``match:`` with a regular expression of parameter names.
        checkpointing: Every how many blocks one is recomputed in backward: 1 is all of them, 0 none.
        moves: Whether activations are offloaded to the host between forward and backward; with ``checkpointing`` 1, the inputs of layers.
    """

    name: str
    settings: Mapping[str, Any]
    attention: str = "sdpa"
    trainable: str = "all"
    checkpointing: int = 0
    moves: bool = False
