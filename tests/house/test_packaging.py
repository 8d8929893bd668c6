"""Installing: from the source folder, from a built wheel and editable, without compiler, network or GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomllib

from tests.support.processes import REPO, environment
from tests.support.rows import slow_but

SOURCES = ("hf_zero", "packaging", "kernels")
FILES = ("pyproject.toml", "_hf_zero_startup.py", "README.md", "LICENSE", "MANIFEST.in")
QUESTION = """
import importlib.metadata as m, importlib.util, sys
import hf_zero.deepspeed
print(importlib.util.find_spec("deepspeed").origin, m.version("deepspeed"), m.version("hf_zero"), hf_zero.deepspeed.__file__)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that building leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.dylib"))
    for name in FILES:
        shutil.copy(REPO / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    said = _pip("wheel", "-v", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (folder / "said.txt").write_text(said)
    (path,) = folder.glob("*.whl")
    return path


def _pip(*arguments: str, python: Path | None = None, compiler: bool = False) -> str:
    """Runs this environment's pip, for another interpreter if given; returns what it printed."""
    target = ["--python", str(python)] if python else []
    # A compiler that always fails stands in for a machine without one.
    without = {} if compiler else {"CC": "/bin/false", "CXX": "/bin/false"}
    env = environment({**without, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    done = subprocess.run([sys.executable, "-m", "pip", *target, *arguments], env=env, capture_output=True, text=True, cwd="/", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _fresh_python(folder: Path) -> Path:
    """A virtual environment with nothing but setuptools, which an editable build without isolation needs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=600)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    import setuptools

    (site / "setuptools_of_test.pth").write_text(f"{Path(setuptools.__file__).parents[1]}\n")
    return python


def _ask(python: Path) -> list[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_ZERO"))}
    done = subprocess.run([str(python), "-c", QUESTION], env=env, capture_output=True, text=True, cwd="/", timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("kind", slow_but(["folder", "wheel", "editable"], "wheel"))  # the suite itself runs in an editable one
def test_alias_is_active_after_every_kind_of_install(kind: str, source: Path, wheel: Path, tmp_path: Path) -> None:
    python = _fresh_python(tmp_path / "venv")
    what = {"folder": [str(source)], "wheel": [str(wheel)], "editable": ["-e", str(source)]}[kind]
    _pip("install", "--no-deps", "--no-build-isolation", *what, python=python)
    origin, alias_version, version, file = _ask(python)
    assert (origin, alias_version) == ("hf_zero", "0.19.6")
    assert version == _version()
    expected = source if kind == "editable" else tmp_path / "venv"
    assert Path(file).resolve().is_relative_to(expected.resolve())
    assert (tmp_path / "venv" / "bin" / "hf-zero").exists()
    _pip("uninstall", "-y", "hf_zero", python=python)
    assert not list((tmp_path / "venv").rglob("hf_zero.pth")), "uninstalling must take the start-up hook along"


def test_wheel_is_pure_and_its_record_is_complete(wheel: Path) -> None:
    import base64
    import hashlib

    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = next(name for name in names if name.endswith("/RECORD"))
        rows = [line.rsplit(",", 2) for line in archive.read(record).decode().split()]
        assert {name for name, _, _ in rows} == names
        for name, digest, size in rows:
            if name != record:
                data = archive.read(name)
                assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                assert int(size) == len(data)
        assert archive.read("hf_zero.pth").startswith(b"import sys; ") and archive.read("hf_zero.pth").count(b"\n") == 1
    assert {"hf_zero/py.typed", "_hf_zero_startup.py", "hf_zero/deepspeed/alias/table.py"} <= names
    assert not {name for name in names if name.startswith(("tests", "examples", "benchmarks"))}


def test_without_compiler_the_install_says_so_in_one_line(wheel: Path) -> None:
    (line,) = [line for line in wheel.with_name("said.txt").read_text().splitlines() if "native kernels" in line]
    assert "no C++ compiler was found; the torch reference serves" in line


REAL_RUNNER = "def main(args=None):\n    print('REAL')\n"


@pytest.fixture(scope="module")
def real_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package like DeepSpeed, which brings a command of the same name."""
    path = tmp_path_factory.mktemp("real") / "deepspeed-9.9.9-py3-none-any.whl"
    info = "deepspeed-9.9.9.dist-info"
    files = {
        "deepspeed/__init__.py": '__version__ = "9.9.9"\n',
        "deepspeed/launcher/__init__.py": "",
        "deepspeed/launcher/runner.py": REAL_RUNNER,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9.9\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ndeepspeed = deepspeed.launcher.runner:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ours", "real"])
def test_two_packages_with_one_command(first: str, wheel: Path, real_wheel: Path, tmp_path: Path) -> None:
    """What the documentation says of uninstalling one of them: the command goes, the rest stays, the report tells, pip brings it back."""
    python = _fresh_python(tmp_path / "venv")
    command = python.with_name("deepspeed")

    def run(*words: str) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_ZERO"))}
        done = subprocess.run(words, env={**env, "PATH": "/usr/bin"}, capture_output=True, text=True, cwd="/", timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def reported() -> str:
        return run(str(python), "-c", "from hf_zero.environment import _deepspeed_command; print(_deepspeed_command())")

    wheels = [str(wheel), str(real_wheel)]
    for one in wheels if first == "ours" else reversed(wheels):
        _pip("install", "--no-deps", one, python=python)
    assert run(str(command)) == "REAL", "whoever answers for the module answers for the command"
    assert reported() == str(command)
    _pip("uninstall", "-y", "deepspeed", python=python)
    assert not command.exists(), "pip has learnt to share files: change the documentation"
    assert reported().startswith("missing: use `hf-zero launch`")
    dry = ("launch", "--dry-run", "--num_gpus", "2", "train.py")
    assert "torch.distributed.run" in run(str(python), "-m", "hf_zero", *dry) == run(str(python.with_name("hf-zero")), *dry)
    _pip("install", "--force-reinstall", "--no-deps", str(wheel), python=python)
    assert "torch.distributed.run" in run(str(command), *dry[1:])
    _pip("install", "--no-deps", str(real_wheel), python=python)
    _pip("uninstall", "-y", "hf_zero", python=python)
    assert not command.exists() and run(str(python), "-c", "import deepspeed; print(deepspeed.__version__)") == "9.9.9"


@pytest.mark.slow
def test_a_hook_without_its_module_is_silent(wheel: Path, tmp_path: Path) -> None:
    """A half-finished uninstall must not make every Python process of the environment print a traceback."""
    python = _fresh_python(tmp_path / "venv")
    _pip("install", "--no-deps", str(wheel), python=python)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_ZERO"))}
    question = "import importlib.util; print(importlib.util.find_spec('deepspeed') is None)"
    for gone, answer in (("nothing", "False"), ("hf_zero", "True"), ("_hf_zero_startup.py", "True")):
        path = site / gone
        if path.exists():
            path.rename(site / f"{gone}.gone")
        done = subprocess.run([str(python), "-B", "-c", question], env=env, capture_output=True, text=True, cwd="/", timeout=600)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, answer, "")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_the_hook_loads_its_own_file_whatever_the_working_folder_holds(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``PYTHONPATH=:x`` begins the search path with the working folder, in every Python process."""
    monkeypatch.syspath_prepend(str(REPO / "packaging"))
    from hf_zero_build import hook_line

    site, here = tmp_path / "site", tmp_path / "here"
    for folder in (site, here):
        folder.mkdir()
    own = (site if kind == "wheel" else tmp_path) / "_hf_zero_startup.py"
    own.write_text("import sys; sys.own = __file__")
    (site / "hf_zero.pth").write_text(hook_line(tmp_path if kind == "editable" else None))
    (here / "_hf_zero_startup.py").write_text("print('code of the working folder ran')")
    code = (
        f"import site, sys; site.addsitedir({str(site)!r}); print(sys.own, sys.modules['_hf_zero_startup'].__file__)\n"
        f"site.addsitedir({str(site)!r})"  # a second one does nothing
    )
    env = {**os.environ, "PYTHONPATH": ":x", "HF_ZERO": "0"}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, cwd=here, timeout=600)
    assert (done.stdout.split(), done.stderr) == ([str(own), str(own)], "")
    own.unlink()
    code = f"import site; print(1); site.addsitedir({str(site)!r})"
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, cwd=here, timeout=600)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_with_compiler_the_library_is_installed_and_used(kind: str, source: Path, tmp_path: Path) -> None:
    if not shutil.which("cmake") or not shutil.which("c++"):
        pytest.skip("needs cmake and a C++ compiler")
    here = tmp_path / "source"
    shutil.copytree(source, here)
    python = _fresh_python(tmp_path / "venv")
    if kind == "wheel":
        _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(here), compiler=True)
        (wheel,) = tmp_path.glob("*.whl")
        assert re.search(r"-py3-none-(linux|macosx)\w*\.whl$", wheel.name)
        what = [str(wheel)]
    else:
        what = ["-e", str(here)]
    _pip("install", "--no-deps", "--no-build-isolation", *what, python=python, compiler=True)
    folder = here if kind == "editable" else tmp_path / "venv"
    (library,) = [path for path in folder.rglob("libhf_zero_kernels.*") if path.parts[-3:-1] == ("hf_zero", "native")]
    needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True).stdout
    assert "libstdc++" not in needed, "a wheel must not depend on the compiler's run-time library"


def test_every_module_is_in_the_wheel(wheel: Path) -> None:
    """A sub-package without ``__init__.py`` would be left out silently."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = {path.relative_to(REPO).as_posix() for path in (REPO / "hf_zero").rglob("*.py")} - names
    assert not missing


def test_building_leaves_no_stale_modules_behind(source: Path, wheel: Path) -> None:
    """setuptools' ``build/`` would carry a deleted module into every later wheel."""
    assert wheel.exists() and not (source / "build").exists()


def test_entry_point_and_extras_are_declared(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entry_points = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt"))
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
    assert "hf-zero = hf_zero.cli:main" in entry_points and "deepspeed = hf_zero.deepspeed.launcher:main" in entry_points
    assert set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE)) == {
        "examples",
        "lightning",
        "test",
        "audit",
        "dev",
        "docs",
        "release",
        "replicas",
        "stores",
    }
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Dist: torch>=2.8" in metadata
    assert "Requires-Dist: deepspeed" not in metadata


def test_version_stands_in_one_place(wheel: Path) -> None:
    project = _project()
    assert "version" not in project and "version" in project["dynamic"]
    assert wheel.name.startswith(f"hf_zero-{_version()}-")
    # `make release` refuses a version without a section.
    assert re.search(rf"^## {re.escape(_version())}\b", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_page_of_the_package_index_has_no_dead_links(wheel: Path) -> None:
    """Relative links of README.md lead to the files of this version there; pictures are shown."""
    with zipfile.ZipFile(wheel) as archive:
        page = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
    project = _project()
    relative = re.findall(r"\]\((?![a-z]+:|#)([^)]+)\)", (REPO / "README.md").read_text())
    assert relative, "README.md has no link to a file of the repository: this test sees nothing"
    for path in relative:
        kind = "raw" if path.endswith((".png", ".svg")) else "blob"
        assert f"]({project['urls']['Repository']}/{kind}/v{_version()}/{path})" in page
    assert not re.findall(r"\]\((?![a-z]+:|#)[^)]*\)", page)
    assert "Description-Content-Type: text/markdown" in page
    assert {f"Project-URL: {name}, {url}" for name, url in project["urls"].items()} <= set(page.splitlines())


def test_the_sdist_holds_what_testing_it_takes(source: Path, tmp_path: Path) -> None:
    """All that is kept under version control, but for local files; `make test` runs in an unpacked one."""
    here = tmp_path / "source"
    shutil.copytree(source, here)
    for folder in ("tests", "benchmarks", "examples", "docs", "tools", ".ci"):
        shutil.copytree(REPO / folder, here / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so", ".gpu-bundle"))
    for path in REPO.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, here / path.name)
    code = "import hf_zero_build, sys; print(hf_zero_build.build_sdist(sys.argv[1]))"
    env = environment({"PYTHONPATH": str(here / "packaging")})
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=here, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    local = ("hf_zero.egg-info", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis")
    files = [path.relative_to(here) for path in here.rglob("*") if path.is_file() and path.suffix not in (".so", ".pyc")]
    wanted = {path.as_posix() for path in files if not set(path.parts) & set(local)}
    assert sorted(wanted - held) == []


def test_a_wheel_for_a_platform_is_never_made_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(REPO / "packaging"))
    import hf_zero_build
    import native_library

    assert hf_zero_build.get_requires_for_build_wheel({"wheel": "pure"}) == hf_zero_build.build_meta.get_requires_for_build_wheel()
    for name in native_library.PLATFORMS:
        assert {"ninja", "ziglang>=0.13"} <= set(hf_zero_build.get_requires_for_build_wheel({"wheel": name}))
        assert native_library.platform_tag(name) == f"py3-none-{name}.manylinux2014_{name.removeprefix('manylinux_2_17_')}"
    with pytest.raises(ValueError, match="wheel is 'manylinux1'; allowed are pure, manylinux_2_17_x86_64"):
        hf_zero_build.get_requires_for_build_wheel({"wheel": "manylinux1"})
    monkeypatch.setattr(native_library.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the library for manylinux_2_17_x86_64 was not built: `cmake"):
        native_library.build_for("manylinux_2_17_x86_64", tmp_path)
    assert not list(tmp_path.iterdir())


def test_oldest_versions_are_the_lower_bounds() -> None:
    command = [sys.executable, str(REPO / "packaging" / "oldest.py"), "torch==2.13.0"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.split()
    bounds = {item.partition(">=")[0]: item.partition(">=")[2] for item in _project()["dependencies"] if ">=" in item}
    assert bounds["torch"] == "2.8"
    assert dict(line.split("==") for line in lines) == bounds | {"torch": "2.13.0"}


def test_every_dependency_is_pinned_and_the_makefile_agrees() -> None:
    """`make venv` must give every machine the same versions."""
    lines = [line for line in (REPO / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    project = _project()
    wanted = project["dependencies"] + [item for extra in project["optional-dependencies"].values() for item in extra]
    names = {re.split(r"[<>=!~; \[]", item)[0].lower().replace("_", "-") for item in wanted}
    assert not names - pins.keys()
    makefile = (REPO / "Makefile").read_text()
    assert set(re.findall(r"torch==[\d.]+", makefile)) == {f"torch=={pins['torch']}"}
    tools = re.search(r"^RELEASE_TOOLS := (.+)$", makefile, re.MULTILINE)[1].split()
    assert tools == [re.split(r"[<>=]", item)[0] for item in project["optional-dependencies"]["release"]]


def test_a_release_tries_files_that_exist_and_names_the_address_that_a_person_must_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "packaging"))
    import release

    paths = re.findall(r'"((?:examples|tests|packaging)/[\w/]+\.py)"', (REPO / "packaging" / "release.py").read_text())
    assert paths and [path for path in paths if not (REPO / path).is_file()] == []
    assert _project()["urls"]["Repository"] in release.what_remains(_version(), Path("dist"))


def _version() -> str:
    import hf_zero

    return hf_zero.__version__


def _project() -> dict[str, object]:
    return tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
