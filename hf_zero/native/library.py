"""Finds the native library, checks its version and the processor, and keeps the reason of what was chosen.

``HF_ZERO_NATIVE`` overrides the choice: ``0`` uses the torch reference, the name of an instruction set that one (``ISAS``),
a path that library.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.observe import log_rank0
from hf_zero.system.planning import planning

VARIABLE = "HF_ZERO_NATIVE"
# "0" keeps Triton out on GPUs. "1" lets its Adam serve, exact but not compared for speed; else torch's fused kernel does.
TRITON_VARIABLE = "HF_ZERO_TRITON"
ABI_VERSION = 6
NAMES = ("libhf_zero_kernels.so", "libhf_zero_kernels.dylib")
# The best first, each with its bit in hfz_supported_isas().
ISAS = {"avx512bf16": 8, "avx512": 4, "avx2": 2, "baseline": 1}

ELEMENT_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_STATUS_TEXT = {1: "an element type that the kernel does not take", 2: "a negative size"}


@dataclass(frozen=True)
class Status:
    """What serves: the library's path and instruction set, or "" and the reason why the torch reference does."""

    path: str
    isa: str
    reason: str

    def __str__(self) -> str:
        return f"{self.isa} ({self.path})" if self.isa else f"torch reference: {self.reason}"


@dataclass(frozen=True)
class Library:
    """A loaded library and the instruction set to call, one of ``ISAS``."""

    handle: ctypes.CDLL
    path: str
    isa: str
    supported: tuple[str, ...]

    @functools.cached_property
    def _functions(self) -> dict[str, Callable[..., int]]:
        return {}

    def has(self, name: str) -> bool:
        """Return whether it holds a kernel of that name."""
        return hasattr(self.handle, f"{name}_{self.isa}")

    def call(self, name: str, *arguments: object) -> None:
        """Calls ``<name>_<isa>``; ctypes gives up the GIL meanwhile.

        Raises:
            HfZeroError: The kernel refused its arguments.
        """
        self._require(name, self._function(name)(*arguments))

    def call_threaded(self, runner: str, name: str, threads: int, *arguments: object) -> None:
        """As ``call``, cut for up to ``threads`` threads that the library starts itself: Python's lock is given up and taken once.

        Args:
            runner: The function of the library that cuts such a kernel's arguments.
            name: The kernel.
            threads: The most threads to use. The result does not depend on it.
            arguments: Of the kernel.
        """
        kernel = ctypes.cast(self._function(name), ctypes.c_void_p)
        self._require(name, getattr(self.handle, runner)(kernel, ctypes.c_int32(threads), *arguments))

    def _function(self, name: str) -> Any:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self.handle, f"{name}_{self.isa}")
        return function

    def _require(self, name: str, code: int) -> None:
        if code:
            raise HfZeroError(f"native kernel {name} got {_STATUS_TEXT.get(code, f'unknown status {code}')}")


def library() -> Library | None:
    """Return the library that serves, or None; what ``HF_ZERO_NATIVE`` says is looked at once per value.

    Raises:
        ConfigError: The variable names an instruction set or a file that is not to be had.
    """
    return None if planning() else _choose(os.environ.get(VARIABLE, ""))[0]


def library_for(tensor: torch.Tensor) -> Library | None:
    """As ``library``, for the memory that ``tensor`` lies in; None for a device. Says once when the torch reference serves instead."""
    if tensor.device.type != "cpu":
        return None
    found = library()
    if found is None:
        announce()
    return found


def status() -> Status:
    """What serves and why; as ``library``."""
    return _choose(os.environ.get(VARIABLE, ""))[1]


@functools.cache
def announce() -> None:
    """Says once on rank 0 when the torch reference serves; called by what would use the library."""
    found = status()
    if not found.isa:
        log_rank0("native kernels are not used, the %s", found)


@functools.cache
def _choose(wish: str) -> tuple[Library | None, Status]:
    if wish == "0":
        return None, Status("", "", f"{VARIABLE}=0")
    folder = Path(__file__).parent
    paths = [Path(wish)] if os.sep in wish else [folder / name for name in NAMES]
    path = next((path for path in paths if path.is_file()), None)
    explicit = wish not in ("", "1")
    try:
        if path is None:
            raise OSError(f"no {paths[0].name} in {paths[0].parent}; no C++ compiler was found at installation (make kernels builds it)")
        found = _load(path, wish if explicit and os.sep not in wish else "")
    except OSError as error:
        if explicit:
            raise ConfigError(f"{VARIABLE} is {wish!r}: {error}. Allowed: 0, {', '.join(ISAS)}, or the path of a library.") from error
        return None, Status("", "", str(error))
    return found, Status(found.path, found.isa, f"best of {', '.join(found.supported)}" if not explicit else f"{VARIABLE}={wish}")


def _load(path: Path, isa: str) -> Library:
    """Opens a library; ``isa`` "" takes the best. Whatever is wrong with it is an ``OSError``."""
    handle = ctypes.CDLL(str(path))
    if not hasattr(handle, "hfz_abi_version") or handle.hfz_abi_version() != ABI_VERSION:
        raise OSError(f"{path} is of another version; build it again (pip install, or make kernels)")
    bits = handle.hfz_supported_isas()
    supported = tuple(name for name, bit in ISAS.items() if bits & bit)
    if isa and isa not in supported:
        raise OSError(f"{isa!r} does not run on this processor; of the instruction sets in {path} it runs only {', '.join(supported)}")
    return Library(handle, str(path), isa or supported[0], supported)
