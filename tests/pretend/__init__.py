"""A pretend accelerator for tests: ``pretend.load()`` gives torch a device type "pretend".

It computes with the CPU's kernels in host memory, and is strict where a device is lenient by luck:

- Addresses of device memory fault when host code uses them, and an operation on tensors of two devices is refused.
- Fresh and freed memory holds NaN.
- Copies from and to page-locked memory run as late as they may: the host sees them when it has waited, and not before.
- Every stream has a clock. An operation that touches bytes which another stream may still be using is an error that names both
  (``wait_stream`` or an event is missing), and so is memory given back while another stream may be using it (``record_stream``).
- It counts what a device does in silence: memory that a caching allocator would hold (``memory_reserved``) when the host runs ahead as far
  as it may, page-locked memory as torch's allocator takes it (powers of two, for good) and as a driver registers it, and the devices that
  this process' threads have called the driver on (``contexts``): on a GPU each costs some hundred MiB.

It says nothing about speed, nccl, fragments of CUDA's own allocator or Triton. One thing differs from a device: operations whose results no
other stream touches run at once.

Environment: ``PRETEND_DEVICES`` (2), ``PRETEND_MEMORY`` (bytes per device, 2 GiB).

``tests/pretend/`` is a device type for torch, compiled once by the tests that use it, which skip without a C++ compiler; it is not in the
wheel. It computes with the CPU's kernels, at addresses that fault when host code uses them. Fresh and freed memory is NaN, tensors of two
devices do not mix, and copies from and to page-locked memory run as late as a device may run them. Every stream has a clock and every
block of memory knows who has used which bytes, so a missing ``wait_stream`` or event is an error each time, memory given away too early
too, not a wrong number now and then. It tells of every wait of the host for the device (``tests/pretend/test_host_waits.py`` allows one
per optimizer step). ``tests/pretend/network.py`` puts collectives in the order nccl has, over gloo. With it the tests train, offload,
checkpoint, save in the background and generate as on a device, against the CPU's numbers, and take waits out of the package to see that
this is noticed (``tests/pretend/test_pretend_engine.py``). Everything that does not put its tensors on the CPU itself can run on it:
``HF_ZERO_TEST_DEVICE=pretend make test TEST_ARGS=...``. It also counts what a device does in silence
(``tests/pretend/test_pretend_memory.py``): memory that a caching allocator would hold while the host is as far ahead as it may be,
page-locked bytes as torch's allocator and as a driver count them, and the devices that a process has called the driver on; its network
wants a rank's tensors on one device, objects included. What it cannot show is speed, nccl, the limits and fragments of CUDA's allocator
and driver, and Triton.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

NAME = "pretend"
FOLDER = Path(__file__).parent
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_library: ctypes.CDLL | None = None


class BuildError(RuntimeError):
    """The extension could not be compiled; the text is the compiler's."""


def compiler() -> str | None:
    """The C++ compiler that builds the extension; None where there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def missing() -> str:
    """Why there can be no pretend accelerator here; "" where there can."""
    import torch

    if compiler() is None:
        return "the pretend accelerator is built with a C++ compiler, and none was found"
    if not hasattr(torch.accelerator, "memory_allocated"):
        return f"torch {torch.__version__} does not count the memory of a device of its kind"
    return ""


@cache
def build() -> Path:
    """The compiled extension, from a folder of this user, these sources and this torch; about 12 seconds the first time.

    Raises:
        BuildError: The compiler failed, or there is none.
    """
    import torch

    sources = sorted(FOLDER.glob("*.cpp"))
    text = b"".join(path.read_bytes() for path in [*sources, *FOLDER.glob("*.h")]) + f"{torch.__version__} {sys.version}".encode()
    folder = Path(tempfile.gettempdir()) / f"hf_zero_pretend_{os.getuid()}_{hashlib.sha256(text).hexdigest()[:16]}"
    library = folder / "libpretend.so"
    if library.exists() and folder.stat().st_uid == os.getuid():
        return library
    chosen = compiler()
    if chosen is None:
        raise BuildError("no C++ compiler was found (g++, c++ or clang++; CXX names another)")
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=folder) as made:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of tests that start together wait for the first, instead of all compiling
        if not library.exists():
            _compile(chosen, sources, Path(made))
            os.replace(Path(made) / library.name, library)
    return library


def _compile(chosen: str, sources: list[Path], folder: Path) -> None:
    """All sources as one: reading torch's headers is most of the work."""
    import torch
    from torch.utils.cpp_extension import include_paths

    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    whole = folder / "pretend.cpp"
    whole.write_text("".join(f'#include "{path}"\n' for path in sources))
    libraries = Path(torch.__file__).parent / "lib"
    flags = ["-std=c++20", "-O0", "-fPIC", "-w", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-I{path}" for path in include_paths())]
    linked = [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    done = subprocess.run([chosen, *flags, str(whole), *linked, "-o", str(folder / "libpretend.so")], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(done.stderr[-4000:])


def load() -> None:
    """Makes the device known to torch, for the life of this process. Nothing happens the second time."""
    global _library
    if _library is not None:
        return
    import torch

    path = str(build())
    torch.ops.load_library(path)
    _library = ctypes.CDLL(path)
    _library.pretend_complaints.restype = ctypes.c_char_p
    _library.pretend_counter.restype = ctypes.c_int64
    _library.pretend_on_wait.argtypes = [_LISTENER]
    _library.pretend_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _library.pretend_unregister.argtypes = [ctypes.c_void_p]
    torch.utils.rename_privateuse1_backend(NAME)
    from tests.pretend import module

    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    torch.utils.generate_methods_for_privateuse1_backend()


def loaded() -> bool:
    """Whether ``load`` has been called in this process."""
    return _library is not None


def library() -> ctypes.CDLL:
    """The extension's C interface."""
    assert _library is not None, "call pretend.load() first"
    return _library


def complaints() -> list[str]:
    """What was done wrong since the last call. Most of it was raised where it happened; a thread may have kept the error to itself."""
    return library().pretend_complaints().decode().splitlines()


def late_copies() -> int:
    """Copies from and to page-locked memory so far that ran beside the computation."""
    return library().pretend_counter(b"late")


def recorded() -> int:
    """Calls of ``record_stream`` so far that named another stream than the memory's own."""
    return library().pretend_counter(b"recorded")


def locked_bytes() -> int:
    """Bytes that are page-locked now: registered ones, and what torch's own allocator has taken and keeps."""
    return library().pretend_counter(b"locked")


def peak_locked_bytes() -> int:
    """The most ``locked_bytes`` since ``reset_counters``."""
    return library().pretend_counter(b"locked_peak")


def contexts() -> set[int]:
    """Indexes of the devices that this process has called the driver on since ``reset_counters``."""
    mask = library().pretend_counter(b"contexts")
    return {index for index in range(mask.bit_length()) if mask >> index & 1}


def reset_counters() -> None:
    """Forgets the peak of ``peak_locked_bytes`` and the devices of ``contexts``."""
    library().pretend_reset()


def pageable_copies() -> int:
    """Copies so far that were asked to run beside the computation and could not: the host memory was not page-locked."""
    return library().pretend_counter(b"pageable")


@contextmanager
def host_waits() -> Iterator[list[tuple[str, str]]]:
    """Lists when the host waits for the device inside: what for (``item``, an event, a copy ...), and from which line.

    That is the innermost line of the package, or of a test if none of it is involved. Waits of the pretend network are its own.
    """
    found: list[tuple[str, str]] = []

    def note(what: bytes) -> None:
        frames = traceback.extract_stack()
        if any(frame.filename.startswith(str(FOLDER / "network")) for frame in frames):
            return
        own = [frame for frame in frames if frame.filename.startswith(str(FOLDER.parents[1] / "hf_zero"))]
        tests = [frame for frame in frames if frame.filename.startswith(str(FOLDER.parent))]
        others = [frame for frame in tests if Path(frame.filename).parent != FOLDER or Path(frame.filename).name.startswith("test_")]
        frame = (own or others or frames)[-1]
        found.append((what.decode(), f"{Path(frame.filename).relative_to(FOLDER.parents[1])}:{frame.lineno} {frame.name}"))

    listener = _LISTENER(note)
    library().pretend_on_wait(listener)
    try:
        yield found
    finally:
        library().pretend_on_wait(_LISTENER())
