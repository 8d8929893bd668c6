"""Kernels over host memory: a native library with a plain C ABI, and a torch reference that is used when the library is missing.

``kernels/`` is C++17 behind a plain C ABI: no Python.h, no torch headers, no C++ run-time library. The build backend compiles it with
cmake where a C++ compiler is found (``make kernels`` does it by hand). ``hf_zero/native/library.py`` loads it with ctypes, compares the
ABI version and chooses the instruction set; ``HF_ZERO_NATIVE`` overrides the choice. Without the library, the torch reference beside
each kernel is used.

One source is compiled once per instruction set over sixteen *lanes* (``lanes.h``): one AVX-512 register, two AVX2 registers, or a loop.
Each operation is one IEEE operation per lane, fused multiply-adds are written out and the compiler may not add any, and the last,
incomplete group runs through the same code on a padded copy. So the result has the same bits on every instruction set, wherever a range
is cut and on any number of threads; Adam's bits are those of torch's fused kernel on x86. ``tests/native/test_native_portable.py`` holds
digests of the results: the build for aarch64 (gcc 12, run under emulation) gives the same ones, and passes the native tests and
``tests/parity/test_parity_accumulation.py``.

On GPUs torch's fused kernel is used. ``HF_ZERO_TRITON=1`` selects the one-pass Triton kernel of Adam, which has been tested in Triton's
interpreter and compiled for three generations of GPUs (``tests/native/triton_compile.py``), and gave the exact numbers on an H100 in the
parity runs; the speeds have not been compared. The codes of 1-bit Adam are Triton kernels on GPUs unless the variable is 0
(``native/library.py``, [Note: trying a kernel first]).

Passes of optimizers, norms and copies share threads that the library keeps (``kernels/threads.cpp``): free threads take the next chunk,
and Python's lock is taken once a pass. On machines of 8 and more processors a thread looks for the next pass for half a millisecond
before it sleeps, because waking a thread costs milliseconds in a virtual machine. A call of the other kernels uses one thread;
``native/ranges.py`` cuts a range for several.
"""

from hf_zero.native.host_updates import (
    AdamRule,
    adagrad_reference,
    adagrad_update,
    adam_reference,
    adam_update,
    lion_reference,
    lion_update,
    sgd_reference,
    sgd_update,
)
from hf_zero.native.library import Status, status
from hf_zero.native.ranges import convert, squared_norm, squared_norm_reference

__all__ = [
    "AdamRule",
    "Status",
    "adagrad_reference",
    "adagrad_update",
    "adam_reference",
    "adam_update",
    "convert",
    "lion_reference",
    "lion_update",
    "sgd_reference",
    "sgd_update",
    "squared_norm",
    "squared_norm_reference",
    "status",
]
