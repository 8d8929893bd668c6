"""Inputs of a plan besides the configuration: ranks, batch shape, hardware, and the user's choices for the model.

The module imports no torch, because flags are checked before torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError

_PARTS_OF_ID = 2  # of an ID on the Hub: owner and name
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)bit(?:/s)?")


@dataclass(frozen=True)
class Cluster:
    """Number and place of the ranks.

    Attributes:
        ranks: Number of ranks over all nodes.
        ranks_per_node: Ranks of one node.
        on_host: Whether ranks compute on CPUs.
    """

    ranks: int
    ranks_per_node: int
    on_host: bool = False

    @property
    def near(self) -> int:
        """Return the number of ranks on one node; all ranks if they do not fill a node."""
        return min(self.ranks, self.ranks_per_node)


@dataclass(frozen=True)
class Load:
    """Shape of the batch of one rank.

    Attributes:
        micro_batch: Samples per micro-step.
        sequence: Tokens per sample.
    """

    micro_batch: int
    sequence: int


@dataclass(frozen=True)
class Hardware:
    """Limits and rates of the hardware that the user gave; None if not given.

    Attributes:
        memory: Bytes of memory of one device.
        host_memory: Bytes of host memory of one node, shared by its ranks.
        flops: Floating-point operations per second of one rank.
        link: Bytes per second that a rank sends to other nodes.
        node_link: Bytes per second that a rank sends inside its node.
    """

    memory: int | None = None
    host_memory: int | None = None
    flops: float | None = None
    link: float | None = None
    node_link: float | None = None


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

    Raises:
        ConfigError: ``name`` is a path of no file or folder.
    """

    name: str
    settings: Mapping[str, Any]
    attention: str = "sdpa"
    trainable: str = "all"
    checkpointing: int = 0
    moves: bool = False

    def __post_init__(self) -> None:
        path = Path(self.name)
        is_path = self.name.startswith((".", "~")) or path.is_absolute() or len(path.parts) > _PARTS_OF_ID
        if is_path and not self.name.startswith("python:") and not path.exists():
            raise unknown_model_error(self.name)


def unknown_model_error(name: str) -> ConfigError:
    """Return the error about a model that is neither a file nor a folder nor anything else that a name may mean."""
    return ConfigError(
        f"the model {name!r} does not exist: give a folder or file with a config.json, an ID on the Hub, a model_type, or "
        "python:FILE.py:FUNCTION"
    )


def bytes_per_second_of(text: str, flag: str) -> float:
    """Return the bytes per second of a rate such as ``400Gbit``.

    Args:
        text: The value of the flag.
        flag: Name of the flag, for the message.

    Raises:
        ConfigError: ``text`` is not a positive rate in kbit, Mbit, Gbit or Tbit.
    """
    found = _RATE.fullmatch(text.strip())
    rate = float(found[1]) * 1000 ** _POWERS[found[2]] / 8 if found else 0
    if found is None or rate <= 0:
        raise ConfigError(f"{flag} is {text!r}; a number of bits per second with kbit, Mbit, Gbit or Tbit is allowed, such as 400Gbit")
    return rate
