"""Builds the native library from ``kernels/`` with cmake: for wheels, for editable installs, and by hand with

    python build_backend/native_library.py

which leaves it in ``hf_zero/native/``, where a source folder on the path finds it. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("hf_zero", "native")  # of the library, in the source folder and in the wheel
_COMPILERS = ("c++", "g++", "clang++")
_LIMIT_SECONDS = 600


def compiler() -> str:
    """The C++ compiler that works here, "" without one. ``CXX`` overrules."""
    for name in [os.environ["CXX"]] if os.environ.get("CXX") else _COMPILERS:
        words = name.split()
        if words and shutil.which(words[0]) and _succeeds([*words, "--version"]):
            return name
    return ""


def tool_requirements() -> list[str]:
    """What to ask of the package index to build here: cmake and ninja where the machine has a compiler and lacks them."""
    if not compiler():
        return []
    wanted = [] if shutil.which("cmake") else ["cmake>=3.18"]
    return wanted if shutil.which("ninja") or shutil.which("make") else [*wanted, "ninja"]


def build(target: Path) -> Path | None:
    """Builds the library into the folder ``target``; without compiler, or when the build fails, says so in a line.

    Returns:
        The library's file, or None.
    """
    if not compiler():
        return _without("no C++ compiler was found")
    if not shutil.which("cmake"):
        return _without("no cmake was found")
    with tempfile.TemporaryDirectory() as scratch:
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        commands = (
            ["cmake", "-S", str(ROOT / "kernels"), "-B", scratch, "-DCMAKE_BUILD_TYPE=Release", *generator],
            ["cmake", "--build", scratch, "--parallel"],
        )
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
            if done.returncode:
                print(done.stdout + done.stderr, file=sys.stderr)
                return _without(f"`{' '.join(command)}` failed (its output stands above)")
        (library,) = [path for suffix in ("so", "dylib") for path in Path(scratch).glob(f"libhf_zero_kernels.{suffix}")]
        target.mkdir(parents=True, exist_ok=True)
        # Renamed into its place: a process that has the old file open keeps it whole.
        fresh = target / f".{library.name}.{os.getpid()}"
        shutil.copy(library, fresh)
        os.replace(fresh, target / library.name)
        print(f"hf_zero: built {library.name} with {compiler()}")
        return target / library.name


def platform_tag() -> str:
    """The tag of a wheel that carries the library and is independent of Python's version."""
    return f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _without(reason: str) -> None:
    print(f"hf_zero: installed without native kernels, because {reason}; the torch reference serves.", file=sys.stderr)


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


if __name__ == "__main__":
    sys.exit(0 if build(ROOT / FOLDER) else 1)
