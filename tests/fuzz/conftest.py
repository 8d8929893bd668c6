"""Folders for the fuzzers to write into, and readers that have been warm once: what they load the first time counts for nobody."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder of the module."""
    folder = tmp_path_factory.mktemp("fuzz")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about read-only memory and the like
        yield folder
    gc.collect()
