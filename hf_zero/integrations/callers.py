"""Wrap a few methods of accelerate, transformers and Lightning when these are imported, to change them or to know that they run.

[Note: callers] An engine must behave differently under different libraries, and no argument names the library. So each method below is
wrapped, and ``running`` returns the calls that are running. Methods are wrapped when their modules are imported, or, if the modules are
imported already, when code first looks for `deepspeed`. ``_hf_zero_startup`` arranges both while hf_zero answers as `deepspeed`, and it
imports none of the libraries. If a library no longer has a method, a warning is logged when its module is imported, and the integration
that needs the method refuses the calls that would give wrong results without it (``lost``, ``require``).

This module imports only the standard library, because every program that imports one of the libraries imports it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from hf_zero.errors import UnsupportedError
from hf_zero.integrations import lightning_table, methods
from hf_zero.integrations.methods import Method

METHODS = (*methods.METHODS, *lightning_table.METHODS)


@dataclass(eq=False)
class Call:
    """One running call of a wrapped method.

    Attributes:
        method: The method that runs.
        caller: The object that the method is called on (its first argument); None for a call without arguments.
        given: Arguments by name.
        answered: Whether an integration has already handled this call; handlers set it so that each call is handled once.
    """

    method: Method
    caller: Any
    given: dict[str, Any] = field(default_factory=dict)
    answered: bool = False


_PROGRAM = "accelerate.commands.launch"  # is run as `python -m` as well
_RUNS = f"""import {_PROGRAM} as program
if __name__ == "__main__":
    program.main()
else:
    globals().update((name, value) for name, value in vars(program).items() if not name.startswith("__"))
"""
_calls: ContextVar[tuple[Call, ...]] = ContextVar("hf_zero calls", default=())
_lost: dict[Method, str] = {}
_attached: WeakKeyDictionary[Any, set[Method]] = WeakKeyDictionary()  # by module or class
_executed: set[str] = set()  # modules that are being imported
_looked_for: set[str] = set()  # modules for which find_spec is running, to prevent recursion


def running(*methods: Method) -> list[Call]:
    """Return the calls of ``methods`` that are running in this thread or task, the innermost first."""
    return [call for call in reversed(_calls.get()) if call.method in methods]


def lost(method: Method) -> str:
    """Return the warning about a method that its imported library lacks; "" if the library has it or is not imported."""
    return _lost.get(method, "")


def require(*methods: Method) -> None:
    """Raise if an imported library lacks one of ``methods``, whose absence would give wrong results.

    Raises:
        UnsupportedError: An imported library lacks a method; the message names both.
    """
    for method in methods:
        imported = method.module in sys.modules
        if not imported and method.module.partition(".")[0] in sys.modules and importlib.util.find_spec(method.module) is None:
            _report(method)
        if method in _lost:
            raise UnsupportedError(_lost[method])


def watch() -> None:
    """Wrap the methods of all libraries that are already imported."""
    for name in {method.module for method in METHODS}:
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            attach(module)


def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """Return the import spec that the other finders return for a module with methods to wrap; its loader also wraps these methods."""
    if fullname in _looked_for:
        return None
    _looked_for.add(fullname)
    try:
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
    finally:
        _looked_for.discard(fullname)
    if spec is None or spec.loader is None:
        return spec
    execute, get_code = spec.loader.exec_module, getattr(spec.loader, "get_code", None)

    def exec_module(module: ModuleType) -> None:
        _attached.pop(module, None)  # a reload defines its functions anew
        _executed.add(fullname)
        try:
            execute(module)
        finally:
            _executed.discard(fullname)
        attach(module)

    def get_code_to_run(name: str) -> Any:
        """Return code for runpy (`python -m`, debuggers) that imports the program, whose methods are wrapped then."""
        code = get_code(name)  # type: ignore[misc]
        return code if name in _executed else compile(_RUNS, code.co_filename, "exec")

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # patch the instance: some libraries inspect the loader's class
    if fullname == _PROGRAM and get_code is not None:
        spec.loader.get_code = get_code_to_run  # type: ignore[attr-defined]
    return spec


def attach(module: ModuleType) -> None:
    """Wrap the methods of one imported module that were not wrapped before; what a script has put in place of a wrapped method stays."""
    for method in METHODS:
        if method.module != module.__name__:
            continue
        *path, name = method.name.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, None)
        if owner is not None and method in _attached.setdefault(owner, set()):
            continue
        found = inspect.getattr_static(owner, name, None)
        bound = isinstance(found, (classmethod, staticmethod, property))
        function = found if not bound else found.fget if isinstance(found, property) else found.__func__
        if not inspect.isfunction(function):
            _report(method)
            continue
        _attached[owner].add(method)
        if function.__dict__.get("hf_zero_method") is not method:
            wrapped = _replaced(method, function) if method.around else function
            if method.seen or not method.around:
                wrapped = _seen(method, wrapped)
            wrapped.__dict__["hf_zero_method"] = method
            setattr(owner, name, type(found)(wrapped) if bound else wrapped)


def _seen(method: Method, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def seen(*args: Any, **kwargs: Any) -> Any:
        call = Call(method, args[0] if args else None, dict(signature.bind_partial(*args, **kwargs).arguments))
        token = _calls.set((*_calls.get(), call))
        try:
            found = function(*args, **kwargs)
        finally:
            _calls.reset(token)
        return _resumed(found, call) if isinstance(found, Generator) else found

    return seen


def _resumed(generator: Generator[Any, None, None], call: Call) -> Generator[Any, None, None]:
    """Yield from ``generator``, and record ``call`` as running only while the generator's body runs, not between its items."""
    with_end = object()
    try:
        while True:
            token = _calls.set((*_calls.get(), call))
            try:
                value = next(generator, with_end)
            finally:
                _calls.reset(token)
            if value is with_end:
                return
            yield value
    finally:
        generator.close()


def _replaced(method: Method, function: Callable[..., Any]) -> Callable[..., Any]:
    module, _, name = method.around.partition(":")

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(function, *args, **kwargs)

    return replaced


def came_later(method: Method) -> bool:
    """Return whether the installed library is known to be older than ``method``."""
    numbers = tuple(map(int, re.findall("[0-9]+", _version(method))[: len(method.since)]))
    return bool(numbers) and numbers < method.since


def _version(method: Method) -> str:
    """Return the version of the installed library that has, or lacks, ``method``."""
    try:
        return importlib.metadata.version(method.module.partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"


def _report(method: Method) -> None:
    """Record that the library lacks ``method``, and warn once; do nothing if the library is older than the method."""
    if not came_later(method) and method not in _lost:
        from hf_zero.observe import warn_once  # imports torch, which the library has imported already

        library = f"{method.module.partition('.')[0]} {_version(method)}"
        _lost[method] = f"{library} has no {method.module}.{method.name}, which hf_zero needs: without it {method.loss}"
        warn_once(_lost[method])
