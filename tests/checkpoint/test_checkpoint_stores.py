"""Checkpoints in object stores: the same files and outcomes as in a folder, invisible until the last write, whatever the store refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.checkpoints import IN_BACKGROUND, differences, full_state, start, steps


def _saves(folder: str, url: str) -> None:
    from hf_zero.errors import CheckpointError

    rank0 = ranks.rank() == 0
    engine = start(3, "bf16")
    assert engine.load_checkpoint(url) == (None, None)
    steps(engine, 0, 1, "bf16")
    engine.save_checkpoint(url, client_state={"rank": ranks.rank()})
    engine.save_checkpoint(folder)
    saved = full_state(engine)
    steps(engine, 1, 1, "bf16")
    engine.save_checkpoint(url, "again")
    steps(engine, 2, 1, "bf16")
    engine.save_checkpoint(url, "again")
    third = full_state(engine)
    path, client = engine.load_checkpoint(url, "global_step1")
    assert differences(full_state(engine), saved) == [] and client == {"rank": ranks.rank()}
    engine.load_checkpoint(path)
    engine.destroy()
