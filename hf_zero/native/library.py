"""Find the native library, check its version and the processor, and record the reason of the choice; decide whether Triton serves a GPU.

``HF_ZERO_NATIVE`` overrides the choice: ``0`` selects the torch reference, the name of an instruction set (``ISAS``) that set, a path the
library at the path.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.observe import log_rank0
from hf_zero.system.planning import has_values, planning

VARIABLE = "HF_ZERO_NATIVE"
# "0" disables Triton on GPUs. "1" enables its Adam, which is exact but was not compared for speed; otherwise torch's fused kernel is used.
TRITON_VARIABLE = "HF_ZERO_TRITON"
ABI_VERSION = 6
NAMES = ("libhf_zero_kernels.so", "libhf_zero_kernels.dylib")
# Best first, each with its bit in hfz_supported_isas().
ISAS = {"avx512bf16": 8, "avx512": 4, "avx2": 2, "baseline": 1}

ELEMENT_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_STATUS_TEXT = {1: "an element type that the kernel does not take", 2: "a negative size"}


@dataclass(frozen=True)
class Status:
    """The implementation in use: the library's path and instruction set, or "" and the reason why the torch reference is used."""

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
        """Return whether the library has a kernel of this name."""
        return hasattr(self.handle, f"{name}_{self.isa}")

    def call(self, name: str, *arguments: object) -> None:
        """Call ``<name>_<isa>``; ctypes releases the GIL meanwhile.

        Raises:
            HfZeroError: The kernel refused its arguments.
        """
        self._require(name, self._function(name)(*arguments))

    def call_threaded(self, runner: str, name: str, threads: int, *arguments: object) -> None:
        """Call a kernel like ``call``, divided among up to ``threads`` threads of the library: Python's lock is released and taken only
        once.

        Args:
            runner: The library's function that divides the arguments of such a kernel.
            name: The kernel.
            threads: Maximum number of threads. The result does not depend on it.
            arguments: Arguments of the kernel.
        """
        kernel = ctypes.cast(self._function(name), ctypes.c_void_p)
        self._require(name, getattr(self.handle, runner)(kernel, ctypes.c_int32(threads), *arguments))

    def serves(self, tensor: torch.Tensor) -> bool:
        """Return whether optimizer passes over masters like ``tensor`` have a kernel."""
        return tensor.device.type == "cpu" and tensor.dtype == torch.float32

    def sum_threaded(self, runner: str, name: str, threads: int, blocks: int, *arguments: object) -> float:
        """Call a kernel like ``call_threaded`` that writes one double per block after ``arguments``, and return the sum of the doubles.

        Args:
            runner: See ``call_threaded``.
            name: The kernel.
            threads: Maximum number of threads.
            blocks: Number of doubles.
            arguments: Arguments of the kernel, without the address of the doubles.
        """
        sums = torch.zeros(blocks, dtype=torch.float64)
        self.call_threaded(runner, name, threads, *arguments, ctypes.c_void_p(sums.data_ptr()))
        return total_of(sums)

    def _function(self, name: str) -> Any:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self.handle, f"{name}_{self.isa}")
        return function

    def _require(self, name: str, code: int) -> None:
        if code:
            raise HfZeroError(f"native kernel {name} got {_STATUS_TEXT.get(code, f'unknown status {code}')}")


class _Pretended(Library):
    """Kernels of a memory plan: passes and norms over tensors without values, which take no memory and no time."""

    def serves(self, tensor: torch.Tensor) -> bool:
        return True

    def call_threaded(self, runner: str, name: str, threads: int, *arguments: object) -> None:
        pass

    def sum_threaded(self, runner: str, name: str, threads: int, blocks: int, *arguments: object) -> float:
        return 1.0


_PRETENDED = _Pretended(None, "", "", ())  # type: ignore[arg-type]  # there is nothing to open


def total_of(sums: torch.Tensor) -> float:
    """Return the sum of a few doubles, rounded once; NaN and infinities propagate as in addition."""
    values = sums.tolist()
    return math.fsum(values) if all(map(math.isfinite, values)) else float(sums.sum())


def library() -> Library | None:
    """Return the library in use, or None; ``HF_ZERO_NATIVE`` is read once per value. In a memory plan, return kernels that compute nothing.

    Raises:
        ConfigError: The variable names an instruction set or a file that is not available.
    """
    return _PRETENDED if planning() else _choose(os.environ.get(VARIABLE, ""))[0]


def library_for(tensor: torch.Tensor) -> Library | None:
    """Return ``library()`` for the memory of ``tensor``; None for a device, and for a tensor without values. Log once if the torch
    reference is used for a host tensor.
    """
    if tensor.device.type != "cpu":
        return None
    found = library() if has_values(tensor) else None
    if found is None:
        announce()
    return found


def status() -> Status:
    """Return the implementation in use and the reason; see ``library``."""
    return _choose(os.environ.get(VARIABLE, ""))[1]


@functools.cache
def announce() -> None:
    """Log once on rank 0 if the torch reference is used; called by code that would use the library."""
    found = status()
    if not found.isa:
        log_rank0("native kernels are not used, the %s", found)


@functools.cache
def _choose(requested: str) -> tuple[Library | None, Status]:
    if requested == "0":
        return None, Status("", "", f"{VARIABLE}=0")
    folder = Path(__file__).parent
    paths = [Path(requested)] if os.sep in requested else [folder / name for name in NAMES]
    path = next((path for path in paths if path.is_file()), None)
    explicit = requested not in ("", "1")
    try:
        if path is None:
            raise OSError(
                f"no {paths[0].name} in {paths[0].parent}: the pure wheel has none, and an installation from source builds it only "
                "where it finds a C++ compiler and cmake"
            )
        found = _load(path, requested if explicit and os.sep not in requested else "")
    except OSError as error:
        if explicit:
            raise ConfigError(f"{VARIABLE} is {requested!r}: {error}. Allowed: 0, {', '.join(ISAS)}, or the path of a library.") from error
        return None, Status("", "", str(error))
    return found, Status(found.path, found.isa, f"best of {', '.join(found.supported)}" if not explicit else f"{VARIABLE}={requested}")


def _load(path: Path, isa: str) -> Library:
    """Open a library; an empty ``isa`` selects the best instruction set. Every failure is an ``OSError``."""
    handle = ctypes.CDLL(str(path))
    if not hasattr(handle, "hfz_abi_version") or handle.hfz_abi_version() != ABI_VERSION:
        raise OSError(f"{path} is of another version; build it again (pip install, or make kernels)")
    bits = handle.hfz_supported_isas()
    supported = tuple(name for name, bit in ISAS.items() if bits & bit)
    if isa and isa not in supported:
        raise OSError(f"{isa!r} does not run on this processor; of the instruction sets in {path} it runs only {', '.join(supported)}")
    return Library(handle, str(path), isa or supported[0], supported)


def triton_serves(device: torch.device, what: str, agrees: Callable[[torch.device], bool]) -> bool:
    """Return whether Triton's kernels are used for tensors on ``device``: on a GPU where Triton works, unless ``HF_ZERO_TRITON`` is 0.

    [Note: trying a kernel first] Triton needs more than its package: a C compiler for its launcher, and a driver that accepts its code. So
    the first use on a device encodes a small vector and compares it with plain torch. If that fails, torch's operations are used, and a log
    line gives the reason.
    Args:
        device: Device of the tensors.
        what: Purpose of the kernels, for messages.
        agrees: Function that returns whether the kernels give torch's bits on the device, or raises Triton's error; called once per device.
    """
    return device.type == "cuda" and os.environ.get(TRITON_VARIABLE) != "0" and _triton_works(device, what, agrees)


@functools.cache
def _triton_works(device: torch.device, what: str, agrees: Callable[[torch.device], bool]) -> bool:
    try:
        same = agrees(device)
    except Exception as error:  # any error: torch's operations can be used instead
        log_rank0("%s: Triton does not work on %s (%s: %s); using torch's operations", what, device, type(error).__name__, error)
        return False
    if not same:
        log_rank0("%s: Triton's kernels and torch's operations give different results on %s; using torch's operations", what, device)
    return same
