"""What code that loads data has to know of the other ranks, whoever started them: Accelerate or Trainer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ranks:
    """Two things that ranks do together."""

    first_rank_first: Callable[[], AbstractContextManager[Any]]  # the others wait until the first rank has left the block
    say: Callable[[str], None]  # prints once


def files_first(ranks: Ranks, args: argparse.Namespace) -> AbstractContextManager[Any]:
    """The first rank goes first where it leaves files for the others; parsing the standard library leaves none, so all do it at once."""
    return ranks.first_rank_first() if leaves_files(args) else nullcontext()


def leaves_files(args: argparse.Namespace) -> bool:
    """Whether the data comes from the hub or from files, so that `datasets` caches what it makes of them."""
    return any(getattr(args, name, None) for name in ("dataset_name", "task_name", "train_file"))
