"""What a user says of the model of a plan; imports little, because flags are checked before torch is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelWish:
    """What a user says of the model.

    Attributes:
        name: A folder or file with a config.json, an ID on the Hub, a ``model_type``, or ``python:FILE.py:FUNCTION``.
        settings: Values of its configuration that win over its own.
        attention: sdpa, flash or eager.
        trainable: ``all``, or ``lora:`` with r=, alpha= and targets=, or ``match:`` with a regular expression of names.
        checkpointing: Recompute activations in backward.
        moves: Activations, or where they are recomputed the inputs of layers, wait on the host for backward.
    """

    name: str
    settings: Mapping[str, Any]
    attention: str = "sdpa"
    trainable: str = "all"
    checkpointing: bool = False
    moves: bool = False
