"""Build the native library from ``kernels/`` with cmake: for wheels, for editable installs, and by hand with

    python packaging/native_library.py

which leaves the library in ``hf_zero/native/``, where a source folder on the path finds it. Standard library only.

The compiler of this machine makes a library for this machine's C library and newer ones: glibc 2.34 gave ``pthread_create`` and similar
functions a new symbol version, which older ones do not have. Libraries to distribute are built by zig (``ziglang`` in the package index).
It includes clang and the symbols of each glibc, for this processor and for others (``PLATFORMS``).
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
FOLDER = Path("hf_zero", "native")  # folder of the library, in the source folder and in the wheel
_COMPILERS = ("c++", "g++", "clang++")
_LIMIT_SECONDS = 600
# Requested platform, which is also the tag of the wheel -> (zig's name of the target, processor). glibc 2.17 of 2012 is aarch64's first.
PLATFORMS = {
    "manylinux_2_17_x86_64": ("x86_64-linux-gnu.2.17", "x86_64"),
    "manylinux_2_17_aarch64": ("aarch64-linux-gnu.2.17", "aarch64"),
}


def compiler() -> str:
    """Return the C++ compiler that works here, "" without one; the variable ``CXX`` takes precedence."""
    for name in [os.environ["CXX"]] if os.environ.get("CXX") else _COMPILERS:
        words = name.split()
        if words and shutil.which(words[0]) and _succeeds([*words, "--version"]):
            return name
    return ""


def tool_requirements(platform: str = "") -> list[str]:
    """Return the packages that a build here needs from the package index: cmake and ninja, if there is a compiler and they are missing.

    Args:
        platform: One of ``PLATFORMS``, which always need zig, cmake and ninja from the index; "" is this machine.
    """
    if platform:
        return ["cmake>=3.18", "ninja", "ziglang>=0.13"]
    if not compiler():
        return []
    wanted = [] if shutil.which("cmake") else ["cmake>=3.18"]
    return wanted if shutil.which("ninja") or shutil.which("make") else [*wanted, "ninja"]


def build(target: Path) -> Path | None:
    """Build the library into the folder ``target``; without a compiler, or when the build fails, print a line with the reason.

    Returns:
        The library's file, or None without a library.
    """
    if not compiler():
        return _without("no C++ compiler was found")
    if not shutil.which("cmake"):
        return _without("no cmake was found")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    done, library = _run_cmake(generator, target)
    if library is None:
        return _without(f"`{done}` failed (its output stands above)")
    print(f"hf_zero: built {library.name} with {compiler()}")
    return library


def build_for(platform: str, target: Path) -> Path:
    """Build the library for one of ``PLATFORMS`` into the folder ``target``, with zig; return its file.

    Raises:
        RuntimeError: The library cannot be built. An explicitly requested wheel is never made without it.
    """
    triple, processor = PLATFORMS[platform]
    # zig's C driver also compiles C++ and, unlike its C++ driver, does not first build a C++ run-time library, which is not needed.
    options = [
        f"-DCMAKE_CXX_COMPILER={sys.executable}",
        f"-DCMAKE_CXX_COMPILER_ARG1=-m ziglang cc -target {triple}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        f"-DCMAKE_SYSTEM_PROCESSOR={processor}",
        "-DCMAKE_MODULE_LINKER_FLAGS=-s",
        "-G",
        "Ninja",
    ]
    done, library = _run_cmake(options, target)
    if library is None:
        raise RuntimeError(f"hf_zero: the library for {platform} was not built: `{done}` failed (its output stands above)")
    return library


def _run_cmake(options: list[str], target: Path) -> tuple[str, Path | None]:
    """Run cmake to build into ``target``; return the last command and the library's file, None if the command failed."""
    with tempfile.TemporaryDirectory() as scratch:
        commands = (
            ["cmake", "-S", str(ROOT / "kernels"), "-B", scratch, "-DCMAKE_BUILD_TYPE=Release", *options],
            ["cmake", "--build", scratch, "--parallel"],
        )
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
            if done.returncode:
                print(done.stdout + done.stderr, file=sys.stderr)
                return " ".join(command), None
        (library,) = [path for suffix in ("so", "dylib") for path in Path(scratch).glob(f"libhf_zero_kernels.{suffix}")]
        target.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that a process that has the old file open keeps it intact.
        fresh = target / f".{library.name}.{os.getpid()}"
        shutil.copy(library, fresh)
        os.replace(fresh, target / library.name)
        return " ".join(commands[-1]), target / library.name


def platform_tag(platform: str = "") -> str:
    """Return the tag of a wheel with the library, for one of ``PLATFORMS`` or this machine, independent of Python's version."""
    if platform:
        return f"py3-none-{platform}.{platform.replace('manylinux_2_17', 'manylinux2014')}"  # the second name is for older installers
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
