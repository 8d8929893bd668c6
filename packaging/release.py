"""Build and check all files of a release; `make release` runs this. It uploads nothing.

    python packaging/release.py --out dist

It builds an sdist, and from the sdist's content a wheel without the native library and one for each of ``native_library.PLATFORMS``. twine
and auditwheel check them, and they are installed into new environments of each Python that is found. Where torch's CPU build is
available, the demo and the quick tests run there with the wheel's package alone, and `make test-quick` with the sdist's. Elsewhere every
module that needs neither torch nor a library on top of it is imported, and the library is called. The last lines list the steps that are
left for a person.
"""

from __future__ import annotations

import argparse
import glob
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import native_library

ROOT = native_library.ROOT
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# constraints.txt pins versions that exist from this Python version on; for older ones pip chooses.
FIRST_PINNED = (3, 11)
_LIMIT_SECONDS = 3600
# Packages that torch brings and hf_zero imports itself, and its other requirements without torch.
_WITHOUT_TORCH = ("numpy", "packaging", "pydantic", "rich", "tqdm", "typing_extensions", "safetensors")
_IMPORTS = """
import ctypes, importlib, importlib.metadata, importlib.util, pathlib, sys
import hf_zero
root = pathlib.Path(hf_zero.__file__).parent
names = [path.relative_to(root.parent).with_suffix("").parts for path in sorted(root.rglob("*.py"))]
names = [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names]
heavy = {"torch", "accelerate", "transformers", "lightning", "triton"}
imported, waiting = 0, 0
for name in names:
    if name in ("hf_zero.__main__", "hf_zero.checkpoint.zero_to_fp32"):
        continue
    try:
        importlib.import_module(name)
        imported += 1
    except ImportError as error:
        cause = error.__cause__ or error
        if not isinstance(cause, ModuleNotFoundError) or cause.name.split(".")[0] not in heavy:
            raise
        waiting += 1
assert importlib.util.find_spec("deepspeed").origin == "hf_zero", "the start-up hook does not serve `deepspeed`"
assert importlib.metadata.version("hf_zero") == hf_zero.__version__
library = next(root.glob("native/*.so"), None)
said = "no library"
if library:
    handle = ctypes.CDLL(str(library))
    sets = handle.hfz_supported_isas()
    flags = pathlib.Path("/proc/cpuinfo")
    flags = flags.read_text() if flags.exists() else ""
    assert bool(sets & 2) == (" avx2 " in flags) and bool(sets & 4) == (" avx512vl " in flags), f"{sets:#x} is not what the processor has"
    said = f"library ABI {handle.hfz_abi_version()}, instruction sets {sets:#x}"
print(f"{imported} modules imported, {waiting} need torch or what is built on it; {said}")
"""


def say(text: str) -> None:
    """Print a line of the report at once."""
    print(f"release: {text}", flush=True)


def run(*command: object, cwd: Path | None = None, **variables: str) -> str:
    """Run a command outside of the source folder; return its output.

    Raises:
        SystemExit: The command failed; its output is printed.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_ZERO", "MAKE"))}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd or "/", env=env | variables, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
        sys.exit(f"release: `{' '.join(words)}` failed with status {done.returncode}; its output stands above")
    return done.stdout


def version() -> str:
    """Return the version in ``hf_zero/__init__.py``; exit unless CHANGELOG.md has a section for it."""
    found = re.search(r'^__version__ = "(.+?)"', (ROOT / "hf_zero" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    if not re.search(rf"^## {re.escape(found[1])}\b", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        sys.exit(f"release: CHANGELOG.md has no section '## {found[1]}'; write one, or change __version__ in hf_zero/__init__.py")
    return found[1]


def build(out: Path, scratch: Path) -> tuple[Path, list[Path], Path]:
    """Build everything into ``out``; return the sdist, the wheels, and the folder with the sdist's content."""
    left = ROOT / "hf_zero.egg-info"  # setuptools writes it beside the sources, where imports would find it
    was_there = left.exists()
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", out, ROOT)
    if not was_there:
        shutil.rmtree(left)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    folder = scratch / sdist.name.removesuffix(".tar.gz")
    for kind in ("pure", *native_library.PLATFORMS):
        setting = f"--config-setting=wheel={kind}"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for ninja and cmake
        run(sys.executable, "-m", "build", "--no-isolation", "--wheel", setting, "--outdir", out, folder, PATH=path)
    wheels = sorted(out.glob("*.whl"))
    for file in (sdist, *wheels):
        say(f"{file.name}, {file.stat().st_size / 1e6:.1f} MB")
    return sdist, wheels, folder


def check_files(sdist: Path, wheels: list[Path]) -> None:
    """Check all files with twine and the wheels with the library with auditwheel; refuse relative links, which do not work on the index."""
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, *wheels)
    say("twine check: passed")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            page = next(archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        dead = re.findall(r"\]\((?![a-z]+:|#)[^)]*\)", page)
        if dead:
            sys.exit(f"release: {wheel.name} shows relative links, dead on the package index: {', '.join(dead[:5])}")
        if wheel.name.endswith("-none-any.whl"):
            continue
        said = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split())
        tag = re.search(r'following platform tag: "(manylinux_2_(\d+)_\w+)"', said)
        claimed = re.search(r"manylinux_2_(\d+)", wheel.name)
        if not tag or not claimed or int(tag[2]) > int(claimed[1]):
            sys.exit(f"release: auditwheel does not confirm the tag of {wheel.name}: {said}")
        say(f"auditwheel: {wheel.name} is {tag[1]}")


def interpreter(wanted: str) -> str:
    """Return a Python of that version that runs here: on the path, one of pyenv's or one of uv's; "" without one."""
    names = [shutil.which(f"python{wanted}") or "", *sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{wanted}.*/bin/python")))]
    if shutil.which("uv"):
        names.append(subprocess.run(["uv", "python", "find", wanted], capture_output=True, text=True).stdout.strip())
    question = "import ensurepip, sys; print('{}.{}'.format(*sys.version_info))"
    for name in filter(None, names):
        if subprocess.run([name, "-c", question], capture_output=True, text=True, cwd="/").stdout.strip() == wanted:
            return name
    return ""


def best_wheel(wheels: list[Path]) -> Path:
    """Return the wheel with the library for this machine, else the wheel without it."""
    machine = f"_{platform.machine()}.whl" if sys.platform == "linux" else "-any.whl"
    pure = next(wheel for wheel in wheels if wheel.name.endswith("-any.whl"))
    return next((wheel for wheel in wheels if wheel.name.endswith(machine)), pure)


def torch_requirement() -> str:
    """Return the requirement of torch for the tests. The index's own build for Linux includes CUDA, gigabytes, so it is the CPU build
    there.
    """
    pinned = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned
    return f"{pinned[0]}+cpu" if sys.platform == "linux" and platform.machine() == "x86_64" else pinned[0]


def installing(python: Path, uv: bool) -> tuple[str, ...]:
    """Return the words before the packages of a command that installs them for ``python``."""
    if uv:
        return ("uv", "pip", "install", "--quiet", "--python", str(python))
    return (str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install")


def check_install(name: str, wanted: str, wheels: list[Path], source: Path, scratch: Path, torch: str, uv: bool) -> str:
    """Install ``torch`` and the wheel into a new environment of the Python ``name``, and try them; return the line for the report."""
    venv = scratch / f"venv-{wanted}"
    run(name, "-m", "venv", venv)
    python = venv / "bin" / "python"
    install = installing(python, uv)
    has_torch = subprocess.run([*install, torch], capture_output=True, cwd="/").returncode == 0
    pure = next(wheel for wheel in wheels if wheel.name.endswith("-any.whl"))
    if not has_torch:
        run(*install, *_WITHOUT_TORCH)
        results = []
        for wheel in (pure, best_wheel(wheels)):
            run(*install, "--no-deps", "--force-reinstall", wheel)
            results.append(run(python, "-c", _IMPORTS).strip())
        run(python, "-m", "compileall", "-q", *venv.glob("lib/python*/site-packages/hf_zero"))
        assert (venv / "bin" / "hf-zero").is_file()
        return f"no {torch} to be had; {results[-1]}; without the library too"
    pins = ("-c", source / "constraints.txt") if tuple(map(int, wanted.split("."))) >= FIRST_PINNED else ()
    run(*install, *pins, f"hf_zero[examples,test] @ {best_wheel(wheels).as_uri()}")
    results = [run(python, "-c", _IMPORTS).strip()]
    for part in ("hf_zero", "_hf_zero_startup.py"):
        # Scripts and tests run beside the installed package: the sources' own copy is removed, and tests that read it follow the link.
        mine = source / part
        mine.rename(source / f"{part}.of-sdist")
        mine.symlink_to(next(venv.glob(f"lib/python*/site-packages/{part}")))
    try:
        began = time.monotonic()
        run(python, "examples/demo/demo.py", cwd=source)
        results.append(f"demo in {time.monotonic() - began:.0f} s")
        results.append("wheel: " + last_line(run(python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "quick", cwd=source)))
    finally:
        for part in ("hf_zero", "_hf_zero_startup.py"):
            (source / part).unlink()
            (source / f"{part}.of-sdist").rename(source / part)
    made = run("make", "test-quick", f"PYTHON={name}", f"VENV={venv}", "TEST_WORKERS=2", cwd=source) if pins else ""
    results.append("sdist: " + last_line(made) if made else "the sdist's `make test` needs Python 3.11")
    return "; ".join(results)


def last_line(text: str) -> str:
    """Return pytest's last line without its frame, such as "51 passed in 20 s"."""
    return text.strip().splitlines()[-1].strip("= ")


def what_remains(number: str, out: Path) -> str:
    """Return the steps that need a person: an account, a key, and a decision."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "(.+?)"', project, re.MULTILINE)
    assert repository
    return f"""release: what is left for you:
  1. set [project.urls] in pyproject.toml to the address where you publish, unless you own {repository[1]}:
     the page's links lead there, and the address was chosen before anything was published. Set today's date in CHANGELOG.md,
     then run `make release` again
  2. make audit advisories, and make gpu on a machine that has one (SECURITY.md, docs/gpu.md)
  3. git tag -s v{number} -m "hf_zero {number}" && git push origin v{number}
  4. {sys.executable} -m twine upload {out}/*
  5. pip install hf_zero=={number} in a fresh environment; then raise __version__ in hf_zero/__init__.py"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files (%(default)s)")
    parser.add_argument("--python", nargs="*", default=PYTHONS, help="versions to install into (%(default)s)")
    parser.add_argument("--torch", default=torch_requirement(), help="torch for the installs; without +cpu it is gigabytes (%(default)s)")
    parser.add_argument("--uv", action="store_true", help="install with uv, which takes seconds and reads UV_FIND_LINKS")
    given = parser.parse_args()
    number = version()
    out: Path = given.out.resolve()
    for old in (*out.glob("hf_zero-*.whl"), *out.glob("hf_zero-*.tar.gz")):
        old.unlink()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hf_zero-release-") as folder:
        scratch = Path(folder)
        sdist, wheels, source = build(out, scratch)
        check_files(sdist, wheels)
        for wanted in given.python:
            name = interpreter(wanted)
            tried = check_install(name, wanted, wheels, source, scratch, given.torch, given.uv) if name else "not found here, not tried"
            say(f"Python {wanted}: {tried}")
            shutil.rmtree(scratch / f"venv-{wanted}", ignore_errors=True)
    print(what_remains(number, out))


if __name__ == "__main__":
    main()
