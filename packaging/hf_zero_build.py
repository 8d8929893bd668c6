"""Build backend: setuptools' wheel, plus the native library and the start-up hook that provides the `deepspeed` alias.

A ``.pth`` file must be directly in site-packages. setuptools can place one there neither for a wheel nor for an editable install.
Wheels are plain zip files, so this backend adds the file through the public hooks of PEP 517 and PEP 660. It writes the editable wheel
itself: one ``.pth`` file with the source folder and then the hook, which Python reads in that order.

The native library is built if a C++ compiler is found (native_library.py). A wheel with the library is tagged for the platform. The
setting ``wheel`` overrides this, as in ``pip wheel --config-settings wheel=manylinux_2_17_x86_64``: ``pure`` builds without the library,
and a platform of ``native_library.PLATFORMS`` builds one that runs on any Linux of that processor with glibc 2.17 or newer.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import native_library
import page
from setuptools import build_meta

page.write()  # before any hook, because each hook makes setuptools read the project's metadata

get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_wheel
build_sdist = build_meta.build_sdist

Settings = dict[str, Any] | None

HOOK_FILE = "hf_zero.pth"
HOOK_MODULE = "_hf_zero_startup.py"
# The hook loads the module by its path. A look-up by name could find another module where the search path begins with a folder that has one
# (`PYTHONPATH=:x` puts the working folder there). A .pth file may outlive the module (an interrupted uninstall, a moved source folder); it
# then does nothing, in every Python process. The two modules that it imports are loaded before any import; `importlib.util` would take
# longer than the whole hook.
_HOOK = """
try:
    import _frozen_importlib as b, _frozen_importlib_external as e
    s = e.spec_from_file_location("_hf_zero_startup", {path})
    m = b.module_from_spec(s)
    s.loader.exec_module(m)
    sys.modules[s.name] = m
except (ImportError, OSError): pass
"""
PURE = "pure"
PURE_TAG = "py3-none-any"


def hook_line(root: Path | None = None) -> str:
    """Return the line of the ``.pth`` file that Python runs at its start.

    Args:
        root: Folder of the module; None is the folder of the ``.pth`` file, which ``site`` calls ``sitedir`` when it runs the line.
    """
    path = repr(str(root / HOOK_MODULE)) if root is not None else f"sitedir + '/{HOOK_MODULE}'"
    code = _HOOK.strip().replace("    ", " ").format(path=path)
    return f"import sys; '_hf_zero_startup' in sys.modules or exec({code!r})\n"


def _wheel_setting(settings: Settings) -> str:
    """Return the setting ``wheel``: "" (this machine), "pure" or a platform.

    Raises:
        ValueError: The setting has another value.
    """
    wanted = str((settings or {}).get("wheel", ""))
    allowed = ("", PURE, *native_library.PLATFORMS)
    if wanted not in allowed:
        raise ValueError(f"hf_zero: the build setting wheel is {wanted!r}; allowed are {', '.join(allowed[1:])}")
    return wanted


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return the requirements of a build: setuptools' own, and the tools that build the library if it is to be built."""
    wanted = _wheel_setting(config_settings)
    tools = [] if wanted == PURE else native_library.tool_requirements(wanted)
    return [*build_meta.get_requires_for_build_wheel(config_settings), *tools]


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Build the wheel with setuptools, then add the native library and the hook; return the file's name.

    Raises:
        RuntimeError: The library for an explicitly requested platform cannot be built.
        ValueError: The setting ``wheel`` has an unknown value.
    """
    wanted = _wheel_setting(config_settings)
    with tempfile.TemporaryDirectory() as folder:
        with _build_folder_elsewhere():
            pure = Path(folder, build_meta.build_wheel(folder, config_settings, metadata_directory))
        with zipfile.ZipFile(pure) as wheel:
            files = {info.filename: wheel.read(info) for info in wheel.infolist() if not info.is_dir()}
        library = _library(wanted, Path(folder))
        if library:
            files[(native_library.FOLDER / library.name).as_posix()] = library.read_bytes()
    tag = native_library.platform_tag(wanted) if library else PURE_TAG
    files[HOOK_FILE] = hook_line().encode()
    files[next(name for name in files if name.endswith(".dist-info/WHEEL"))] = _wheel_file(tag)
    name = pure.name.replace(PURE_TAG, tag)
    _write_wheel(Path(wheel_directory, name), files)
    return name


def _library(wanted: str, folder: Path) -> Path | None:
    """Build the library that the setting ``wheel`` requests into ``folder``; return its path, or None without a library."""
    if wanted == PURE:
        return None
    return native_library.build_for(wanted, folder) if wanted else native_library.build(folder)


def build_editable(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Build a wheel with the metadata and one ``.pth`` file that names this source folder; return the file's name.

    The native library stays in the source folder, from which the package is imported.
    """
    root = native_library.ROOT
    library = native_library.build(root / native_library.FOLDER)
    tag = native_library.platform_tag() if library else PURE_TAG
    with tempfile.TemporaryDirectory() as folder:
        dist_info = Path(folder, prepare_metadata_for_build_wheel(folder, config_settings))
        files = {
            f"{dist_info.name}/{file.relative_to(dist_info).as_posix()}": file.read_bytes()
            for file in dist_info.rglob("*")
            if file.is_file()
        }
        files[f"{dist_info.name}/WHEEL"] = _wheel_file(tag)
        files[HOOK_FILE] = f"{root}{os.linesep}{hook_line(root)}".encode()
        name = f"{dist_info.stem}-0.editable-{tag}.whl"
        _write_wheel(Path(wheel_directory, name), files)
    return name


@contextmanager
def _build_folder_elsewhere() -> Iterator[None]:
    """Make setuptools build outside the sources, inside the context; it never empties ``build/``, so it would pack deleted modules
    again.
    """
    before = os.environ.get("DIST_EXTRA_CONFIG")
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "distutils.cfg")
        settings.write_text(f"[build]\nbuild_base = {folder}/build\n", encoding="utf-8")
        os.environ["DIST_EXTRA_CONFIG"] = str(settings)
        try:
            yield
        finally:
            os.environ.pop("DIST_EXTRA_CONFIG")
            if before is not None:
                os.environ["DIST_EXTRA_CONFIG"] = before


def _wheel_file(tag: str) -> bytes:
    pure = "true" if tag == PURE_TAG else "false"
    return f"Wheel-Version: 1.0\nGenerator: hf_zero_build\nRoot-Is-Purelib: {pure}\nTag: {tag}\n".encode()


def _write_wheel(path: Path, files: dict[str, bytes]) -> None:
    """Write a wheel with a new RECORD; the metadata folder comes last, as the format recommends."""
    record = next(name for name in files if name.endswith(".dist-info/WHEEL")).replace("/WHEEL", "/RECORD")
    files.pop(record, None)
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,\n"]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name in sorted(files, key=lambda file: (".dist-info/" in file, file)):
            wheel.writestr(name, files[name])


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
