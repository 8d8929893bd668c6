"""Reading pickles of others without running what they name: tensors and plain values come out, classes become inert records."""

from __future__ import annotations

import pickle  # nosec B403
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from hf_zero.errors import CheckpointError

_TENSORS = {
    ("torch._utils", name): getattr(torch._utils, name)
    for name in ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_tensor", "_rebuild_parameter_with_state")
}
_PLAIN: dict[tuple[str, str], Any] = {
    # A tensor with attributes of its own; what they are is left out, and the class of a subclass too.
    ("torch._tensor", "_rebuild_from_type_v2"): lambda rebuild, kind, arguments, state: rebuild(*arguments),
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "slice"): slice,
    ("builtins", "range"): range,
    ("builtins", "bytearray"): bytearray,
    ("_codecs", "encode"): lambda text, encoding: str(text).encode(str(encoding)),
}


class Inert:
    """Stands for an object of a class that is not loaded: keeps what the pickle says of it, does nothing.

    Attributes:
        kind: Module and name of the class.
        arguments: What it was constructed with.
        state: Its attributes.
    """

    kind = ""

    def __new__(cls, *arguments: Any, **keywords: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = dict(keywords)
        return made

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = dict(state) if isinstance(state, dict) else {"state": state}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state[key] = value

    def append(self, item: Any) -> None:
        """Takes an item of a list of an unknown class."""
        self.state.setdefault("items", []).append(item)

    def get(self, name: str, default: Any = None) -> Any:
        """Attribute ``name`` of the object."""
        return self.state.get(name, default)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Tensors and plain containers; for any other name an inert class of its own."""
        if (module, name) in _TENSORS:
            return _TENSORS[(module, name)]
        if (module, name) in _PLAIN:
            return _PLAIN[(module, name)]
        if module in ("torch", "torch.storage") and name.endswith("Storage") and hasattr(torch, name):
            return getattr(torch, name)
        if module == "torch.storage" and name in ("TypedStorage", "UntypedStorage"):
            return getattr(torch.storage, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return type(f"Inert_{name}", (Inert,), {"kind": f"{module}.{name}"})


_MODULE = types.ModuleType("hf_zero_inert_pickle")
_MODULE.Unpickler = _Unpickler  # type: ignore[attr-defined]
_MODULE.load = lambda file, **keywords: _Unpickler(file, **keywords).load()  # type: ignore[attr-defined]
_MODULE.UnpicklingError = pickle.UnpicklingError  # type: ignore[attr-defined]


def load_pickle(path: Path) -> Any:
    """The contents of a file that torch.save wrote, tensors mapped from the file.

    PyTorch's own weights-only reader is asked first; where that refuses a class, an unpickler reads on that makes an ``Inert`` of
    everything that is no tensor and no plain value. Neither runs code that the file names.

    Raises:
        CheckpointError: It cannot be read; names the file.
    """
    try:
        mapped = zipfile.is_zipfile(path)  # files from before PyTorch 1.6 are none, and are read whole
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError:  # a class that PyTorch does not know as harmless
        return _load_inert(path, mapped)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _load_inert(path: Path, mapped: bool) -> Any:
    try:
        # The unpickler of _MODULE makes records of all classes and calls nothing that the file names.
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=False, pickle_module=_MODULE)  # nosec B614
    except Exception as error:  # whatever a broken pickle raises
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error


def require_trust(trusted: bool, path: Path, rules: str = "by rules that load tensors and plain values and run nothing") -> None:
    """Refuses a pickle unless the user asked for it; ``rules`` says how it would be read.

    Raises:
        CheckpointError: ``--trust-pickle`` was not given.
    """
    if not trusted:
        raise CheckpointError(
            f"{path} is a pickle, and is not opened unless you say so: add --trust-pickle if you know its origin. It is then read {rules}"
        )
