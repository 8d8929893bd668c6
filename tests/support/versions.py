"""Versions of the libraries that the tests run with: `make test-oldest` has older ones than `make test`."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import pytest
from packaging.version import Version


def has(library: str, version: str) -> bool:
    """Return whether ``library`` is installed in ``version`` or a later one."""
    return importlib.util.find_spec(library) is not None and Version(metadata.version(library)) >= Version(version)


def needs(library: str, version: str, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if ``library`` is older than ``version``; ``reason`` says what the older versions lack."""
    return pytest.mark.skipif(not has(library, version), reason=f"{library} before {version}: {reason}")


TRANSFORMERS_5 = has("transformers", "5.0")
PARALLELISM_CONFIG = needs("accelerate", "1.12", "ParallelismConfig has no sequence or context parallelism")
