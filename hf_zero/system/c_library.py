"""Call functions of the C library that Linux has and Python does not offer."""

from __future__ import annotations

import ctypes
import sys
from typing import Any


def linux_function(name: str, *argument_types: Any) -> Any:
    """Return the C function ``name``; None on other systems, or if the library has no such function."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = list(argument_types)
    return function
