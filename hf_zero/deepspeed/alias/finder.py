"""Find and load the alias modules: decide whether hf_zero answers as `deepspeed`, and provide its modules and distribution metadata.

This module imports only the standard library, because it runs in every process that looks for `deepspeed`, the `accelerate` command line
included.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_zero.deepspeed.alias.table import DEEPSPEED_VERSION, MODULES, PROVIDED, UNUSED, refusal
from hf_zero.errors import ConfigError, StateError, UnsupportedError

SWITCH = "HF_ZERO"
_ON = ("1", "true", "on", "yes")
_OFF = ("0", "false", "off", "no")
_METADATA = f"""Metadata-Version: 2.1
Name: deepspeed
Version: {DEEPSPEED_VERSION}
Summary: The part of DeepSpeed's API that Hugging Face libraries use, served by hf_zero
License: Apache-2.0
"""

# `python -m` imports `__main__` of these modules, because they are packages here; it then calls the function.
_COMMANDS = {
    "deepspeed.env_report.__main__": "hf_zero.environment:cli_main",
    "deepspeed.launcher.runner.__main__": "hf_zero.deepspeed.launcher:main",
    "deepspeed.checkpoint.ds_to_universal.__main__": "hf_zero.deepspeed.served.state_files:main",
    "deepspeed.utils.zero_to_fp32.__main__": "hf_zero.checkpoint.zero_to_fp32:main",
}

_forced = False


class RefusedAttributeError(UnsupportedError, AttributeError):
    """Error for reading a refused name of DeepSpeed as an attribute; an AttributeError, so that ``hasattr`` returns False."""


class RefusedImportError(UnsupportedError, ImportError):
    """Error for importing a refused name of DeepSpeed; an ImportError, so that optional imports fall back."""

    def __init__(self, message: str, name: str) -> None:
        ImportError.__init__(self, message, name=name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs: a pool of processes sends its workers' errors, and one that cannot be read again stops the pool."""
        return type(self), (*self.args, self.name)


class AliasModule(types.ModuleType):
    """One module of the alias, which resolves names through the table at first use."""

    def __getattr__(self, name: str) -> Any:
        """Resolve ``name`` through the table and store the result, so that code outside may replace and restore it.

        Raises:
            RefusedAttributeError: The table refuses the name; the message gives the reason.
            AttributeError: The table does not have the name.
        """
        if name == "__all__":  # `from deepspeed.x import *`
            return self._names()
        full_name = f"{self.__name__}.{name}"
        target = PROVIDED.get(full_name)
        if target is not None or full_name in UNUSED:
            value = load_target(target) if target is not None else _refusing_class(full_name)
            setattr(self, name, value)
            return value
        if full_name in MODULES:
            return importlib.import_module(full_name)
        # Python itself looks up dunder names, so no explanation is needed.
        reason = refusal(full_name) if not name.startswith("__") else None
        if reason is not None:
            raise RefusedAttributeError(_refusal_message(full_name, reason) + _nearest(full_name))
        raise AttributeError(f"module {self.__name__!r} (hf_zero's alias) has no attribute {name!r}{_nearest(full_name)}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but keep a name of the table when the import of a submodule would overwrite it, as in DeepSpeed's packages."""
        if not (isinstance(value, AliasModule) and f"{self.__name__}.{name}" in PROVIDED):
            super().__setattr__(name, value)

    def _names(self) -> list[str]:
        """Return the public names that the table has for this module."""
        prefix = f"{self.__name__}."
        rows = (row.removeprefix(prefix) for row in PROVIDED if row.startswith(prefix))
        return sorted(row for row in rows if "." not in row and not row.startswith("_"))

    def __dir__(self) -> list[str]:
        prefix = f"{self.__name__}."
        rows = {row[len(prefix) :].partition(".")[0] for row in PROVIDED if row.startswith(prefix)}
        return sorted(rows | set(super().__dir__()))


class AliasLoader(importlib.abc.Loader):
    """The loader of alias modules; a refused module has a spec too, and its import raises an error with the reason."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return an empty module whose attributes come from the table.

        Raises:
            RefusedImportError: The table refuses this module, or the name imported from a module.
        """
        reason = refusal(spec.name) if spec.name not in MODULES else None
        if reason is not None:
            raise RefusedImportError(_refusal_message(spec.name, reason) + _nearest(spec.name), spec.name)
        return AliasModule(spec.name, f"`{spec.name}` as hf_zero provides it; hf_zero.deepspeed.alias.table lists its names.")

    def get_code(self, fullname: str) -> types.CodeType:
        """Return the code object that ``python -m`` runs; only modules in ``_COMMANDS`` have one."""
        module, _, function = _COMMANDS[fullname].partition(":")
        return compile(f"import sys\nfrom {module} import {function}\nsys.exit({function}())", fullname, "exec")

    def exec_module(self, module: types.ModuleType) -> None:
        """Set file and version of the module; there is no code to execute. Python shows the file in errors about missing names."""
        module.__dict__["__file__"] = str(Path(__file__).with_name("table.py"))
        if module.__name__ == "deepspeed":
            module.__dict__["__version__"] = DEEPSPEED_VERSION
            parts = (int(part) for part in DEEPSPEED_VERSION.split("."))
            module.__dict__.update(zip(("__version_major__", "__version_minor__", "__version_patch__"), parts, strict=True))


class AliasDistribution(importlib.metadata.Distribution):
    """Metadata of a distribution named `deepspeed`, with the version whose API the alias follows."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of the METADATA file; None for any other file."""
        return _METADATA if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Return the path that a file of the distribution would have; the distribution has no files."""
        return Path(__file__).parent / path


def load_target(target: str) -> Any:
    """Import and return the object that a table entry ``"module:attribute"`` names; without a colon the module itself."""
    module_name, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module_name)
    for part in attribute.split(".") if attribute else ():
        value = getattr(value, part)
    return value


def _refusing_class(full_name: str) -> type:
    """Return a class without instances: calling it raises the error that an import of the refused name raises."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(_refusal_message(full_name, refusal(full_name) or ""))

    module, _, name = full_name.rpartition(".")
    return type(name, (), {"__new__": refuse, "__module__": module, "__doc__": f"Not provided: {refusal(full_name)}."})


def alias_is_active() -> bool:
    """Return whether hf_zero serves `import deepspeed` in this process.

    If `deepspeed` is imported already, that module decides. Otherwise ``HF_ZERO=0`` turns the alias off, ``HF_ZERO=1`` or
    :func:`install_as_deepspeed` turn it on, and without them it is on if no other finder finds a real `deepspeed`.

    Raises:
        ConfigError: ``HF_ZERO`` has another value.
    """
    loaded = sys.modules.get("deepspeed")
    if loaded is not None:
        return isinstance(loaded, AliasModule)
    if _forced:
        return True
    switch = os.environ.get(SWITCH, "").strip().lower()
    if switch in _OFF:
        return False
    if switch in _ON:
        return True
    if switch:
        raise ConfigError(
            f"environment variable {SWITCH} is {os.environ[SWITCH]!r}; allowed are 1 (hf_zero serves `import deepspeed`), 0 "
            "(it does not), and unset (it does if DeepSpeed is not installed)"
        )
    return not real_deepspeed_importable()


def is_switched_on() -> bool:
    """Return whether ``HF_ZERO`` turns the alias on."""
    return os.environ.get(SWITCH, "").strip().lower() in _ON


def served_deepspeed() -> str:
    """Return a clause that says which package serves `import deepspeed` in this process."""
    if alias_is_active():
        return "serves `import deepspeed`"
    switch = os.environ.get(SWITCH, "").strip()
    why = f"{SWITCH}={switch}" if switch else f"DeepSpeed is installed, {SWITCH} is not set"
    return f"does not serve `import deepspeed`: {why}"


def real_deepspeed_importable() -> bool:
    """Return whether another finder finds a `deepspeed` with code in it; a bare folder of that name does not count."""
    from _hf_zero_startup import DeepSpeedAliasFinder

    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if finder is DeepSpeedAliasFinder or find is None:
            continue
        spec = find("deepspeed", None)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            return True
    return False


def find_spec(fullname: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of one alias module, provided or refused; None when the alias is off or does not know the name."""
    if not alias_is_active():
        return None
    if fullname in _COMMANDS:
        return importlib.machinery.ModuleSpec(fullname, AliasLoader(), origin="hf_zero")
    if fullname.endswith(".__main__") or (fullname not in MODULES and refusal(fullname) is None):
        return None
    # Every module is a package, even without submodules. Then `from deepspeed.x import y` looks for the module
    # `deepspeed.x.y` if there is no such attribute, and the error for a refused name can give the reason.
    return importlib.machinery.ModuleSpec(fullname, AliasLoader(), origin="hf_zero", is_package=True)


def find_distributions() -> Iterator[importlib.metadata.Distribution]:
    """Yield the distribution `deepspeed`, while the alias is active."""
    if alias_is_active():
        yield AliasDistribution()


def install_as_deepspeed() -> None:
    """Make hf_zero serve `import deepspeed` in this process, whatever is installed and whatever value ``HF_ZERO`` has.

    This is needed only if the start-up hook did not run (a source tree on ``PYTHONPATH``, a frozen application). It does nothing if the
    alias is imported already. Names that accelerate has not imported, because it found no deepspeed, are added to its modules.

    Raises:
        StateError: A real DeepSpeed is imported already.
    """
    global _forced
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and not isinstance(loaded, AliasModule):
        raise StateError(
            f"a real deepspeed ({getattr(loaded, '__file__', 'unknown file')}) is imported already; "
            f"call install_as_deepspeed() before anything imports it, or start with {SWITCH}=1"
        )
    import _hf_zero_startup

    if _hf_zero_startup.DeepSpeedAliasFinder not in sys.meta_path:
        sys.meta_path.insert(0, _hf_zero_startup.DeepSpeedAliasFinder)  # type: ignore[arg-type]
    _forced = True
    _complete_accelerate()


def _complete_accelerate() -> None:
    """Add to accelerate's modules the names of its ``utils.deepspeed`` that they import only where a deepspeed is found."""
    here = [sys.modules[name] for name in ("accelerate.utils", "accelerate.accelerator") if name in sys.modules]
    if all(hasattr(module, "DummyOptim") for module in here):
        return
    theirs = importlib.import_module("accelerate.utils.deepspeed")
    for name, value in vars(theirs).items():
        if getattr(value, "__module__", "") == theirs.__name__:
            for module in here:
                vars(module).setdefault(name, value)


def _refusal_message(full_name: str, reason: str) -> str:
    return f"{full_name} is not provided by hf_zero: {reason}"


def _nearest(full_name: str) -> str:
    known: Sequence[str] = difflib.get_close_matches(full_name, PROVIDED, n=1, cutoff=0.8) if "__" not in full_name else ()
    return f"; did you mean {known[0]}?" if known else ""
