"""The kernels under the address and undefined-behaviour sanitizers: the tests of this folder against a sanitizer build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPO, environment

# The build alone takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(3600)

# Wrong accesses that the sanitizers must see, or the test that follows says nothing.
CRIME = """
import torch
from hf_zero.native.library import library
from hf_zero.native.passes import address
import ctypes
values = torch.zeros(64)
library().call("hfz_squared_norm", ctypes.c_int64(1 << 16), address(values), 1, address(torch.zeros(1, dtype=torch.float64)))
"""


def _output(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(more), capture_output=True, text=True, cwd=REPO, timeout=2700)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A sanitizer build, and the variables that make a Python use it."""
    if not shutil.which("cmake") or not shutil.which("c++"):
        pytest.skip("needs cmake and a C++ compiler")
    folder = tmp_path_factory.mktemp("sanitized")
    for command in (
        ["cmake", "-S", str(REPO / "kernels"), "-B", str(folder), "-DHFZ_SANITIZE=ON"],
        ["cmake", "--build", str(folder)],
    ):
        done = _output(command)
        assert done.returncode == 0, done.stdout + done.stderr
    # Python itself is not instrumented, so the sanitizers' run-time library has to come first.
    runtimes = [_output(["c++", f"-print-file-name={name}"]).stdout.strip() for name in ("libasan.so", "libubsan.so")]
    if not all(Path(path).is_absolute() for path in runtimes):
        pytest.skip("the compiler has no libasan and libubsan")
    return {
        "HF_ZERO_NATIVE": str(folder / "libhf_zero_kernels.so"),
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own allocations at exit
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


@pytest.mark.slow
def test_kernels_are_clean_under_the_sanitizers(sanitized: dict[str, str]) -> None:
    caught = _output([sys.executable, "-c", CRIME], **sanitized)
    assert "AddressSanitizer" in caught.stderr, caught.stdout + caught.stderr
    names = ("native_adam", "native_kernels", "native_quantize", "native_threads", "ops")
    tests = [f"tests/native/test_{name}.py" for name in names]
    done = _output([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], **sanitized)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "AddressSanitizer" not in done.stderr and "runtime error" not in done.stderr
