"""Encode Python values as JSON with tensors in a separate file, and decode them without running any code.

Values that JSON represents exactly stay as they are: None, bool, int, str, finite float, list, dict with string keys. Values of other
supported types become ``{"$": tag, ...}``. A value of an unsupported type raises an error that names its path, or is pickled if the
configuration allows pickles.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import importlib
import math
import pathlib
import pickle
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_zero.checkpoint.format.names import DTYPES, NAMES
from hf_zero.errors import CheckpointError
from hf_zero.system.reading import reading

PICKLE_KEY = "hf_zero.pickle_client_state"


def pickled(value: Any, what: str) -> bytes:
    """Return the pickle of ``value``.

    Raises:
        CheckpointError: The value cannot be pickled; the message begins with ``what``.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:  # a value's class may raise any error
        raise CheckpointError(f"{what}, cannot be pickled ({type(error).__name__}: {error}); leave it out") from error


def unpickled(data: bytes) -> Any:
    """Return the value of a pickle. This can run any code that ``data`` names, so it needs the user's permission in the configuration."""
    return pickle.loads(data)


_TAG = "$"
_NUMPY_KINDS = "biufcSUMm"  # allowed values of numpy.dtype.kind; objects and records are not
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
_TIMES = (datetime.datetime, datetime.date, datetime.time)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_FACTORIES: dict[str, Any] = {"None": None, **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}}
_MOST_DIMENSIONS = 8
_REBUILT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mmengine.logging.history_buffer.HistoryBuffer": lambda made: {
        "log_history": made.data[0],
        "count_history": made.data[1],
        "max_length": made.max_length,
    },
}
"""Classes whose objects the trainers of other libraries save with every checkpoint, and the arguments that make an equal object."""
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Encoder:
    """An encoder of values as JSON that collects the tensors inside them.

    Args:
        may_pickle: Whether to pickle values of unsupported types instead of raising an error.

    Attributes:
        tensors: Tensors for the tensor file, by their names in the JSON.
    """

    def __init__(self, may_pickle: bool = False) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._may_pickle = may_pickle
        self._open: set[int] = set()  # ids of the containers around the current value, to detect cycles

    def encode(self, value: Any, path: str) -> Any:
        """Return the JSON form of ``value``.

        Args:
            value: Any nesting of the supported types.
            path: Name of the value in messages (``client_state``).

        Raises:
            CheckpointError: A value has an unsupported type, or a container contains itself; the message names its path.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, (np.ndarray, np.generic)):
            return _numpy(value, path)
        leaf = _leaf(value)
        if leaf is not None:
            return leaf
        if id(value) in self._open:
            raise CheckpointError(f"{path} contains itself and cannot be saved")
        self._open.add(id(value))
        try:
            return self._container(value, path)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in (list, tuple, torch.Size):
            items = [self.encode(item, f"{path}[{position}]") for position, item in enumerate(value)]
            return items if kind is list else {_TAG: "size" if kind is torch.Size else "tuple", "items": items}
        if kind in (set, frozenset):
            ordered = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
            return {_TAG: kind.__name__, "items": [self.encode(item, f"{path}{{{item!r}}}") for item in ordered]}
        if kind is deque:
            return {_TAG: "deque", "items": self.encode(list(value), path), "maxlen": value.maxlen}
        if kind in _NAMESPACES:
            return {_TAG: kind.__name__, "items": self.encode(vars(value), path)}
        if kind is defaultdict and _factory_name(value) is not None:
            return {_TAG: "defaultdict", "items": self.encode(dict(value), path), "factory": _factory_name(value)}
        if kind is Counter:
            return {_TAG: "Counter", "items": self.encode(dict(value), path)}
        if kind not in (dict, OrderedDict):
            return self._other(value, path)
        if kind is dict and all(type(key) is str and not key.startswith(_TAG) for key in value):
            return {key: self.encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        if any(isinstance(key, torch.Tensor) for key in value):
            raise CheckpointError(
                f"{path} has tensors as keys, which would be other objects after a load, so that nothing would find its entries: use names "
                "or numbers as keys (an optimizer: self.state[param]), or leave it out"
            )
        pairs = [[self.encode(key, f"key {key!r} of {path}"), self.encode(item, f"{path}[{key!r}]")] for key, item in value.items()]
        return {_TAG: "dict" if kind is dict else "OrderedDict", "items": pairs}

    def _other(self, value: Any, path: str) -> Any:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name in _REBUILT:
            return {_TAG: "rebuilt", "class": name, "items": self.encode(_REBUILT[name](value), path)}
        if not self._may_pickle:
            raise CheckpointError(
                f"{path} is a {name}, which cannot be saved without pickle. Allowed are None, numbers, strings, bytes, lists, tuples, "
                "sets, dicts, namespaces, times, paths, tensors, NumPy arrays and numbers, torch dtypes and devices; convert it (for "
                f"example with dict(...) or str(...)), leave it out, or set {PICKLE_KEY} to true in the configuration"
            )
        return {_TAG: "pickle", "base64": base64.b64encode(pickled(value, f"{path}, a {name}")).decode()}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.dtype not in NAMES or value.is_meta:
            raise CheckpointError(
                f"{path} is a tensor of layout {value.layout} and dtype {value.dtype} on {value.device}, which safetensors cannot hold; "
                "convert it to a dense tensor of another dtype or leave it out"
            )
        if hasattr(type(value), "__tensor_flatten__"):  # quantized and distributed tensors consist of several tensors
            raise CheckpointError(
                f"{path} is a {type(value).__name__}, a tensor subclass that wraps several tensors, which cannot be saved; "
                "convert it to a plain tensor"
            )
        name = f"{len(self.tensors):05d} {path}"
        self.tensors[name] = value.detach()
        return {_TAG: "tensor", "name": name}


def encode_scalar(value: Any, path: str) -> Any:
    """Return the JSON form of a number, or of a tensor of one number, which is stored in the JSON without loss.

    Raises:
        CheckpointError: ``value`` is neither; the message names ``path``.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise CheckpointError(
                f"{path} is a tensor of shape {tuple(value.shape)} and dtype {value.dtype}, expected a single real number"
            )
        shape = {"shape": list(value.shape)} if value.ndim else {}
        return {_TAG: "scalar", "dtype": NAMES[value.dtype], "value": encode_scalar(value.item(), path), **shape}
    if value is None or type(value) in (bool, int, float):
        return Encoder().encode(value, path)
    raise CheckpointError(f"{path} is a {type(value).__name__}, expected a tensor or a number; it cannot be saved")


def _leaf(value: Any) -> Any:
    if type(value) in (bytes, bytearray):
        return {_TAG: type(value).__name__, "base64": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {_TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if type(value) is range or type(value) is slice:
        return {_TAG: type(value).__name__, "value": [value.start, value.stop, value.step]} if _plain_bounds(value) else None
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_TAG: "device", "value": str(value)}
    if type(value) in _TIMES:
        return {_TAG: type(value).__name__, "value": value.isoformat()}
    if type(value) is datetime.timedelta:
        return {_TAG: "timedelta", "value": [value.days, value.seconds, value.microseconds]}
    if type(value) in _PATHS:
        return {_TAG: "path", "value": str(value)}
    return None


def _factory_name(value: defaultdict[Any, Any]) -> str | None:
    """Return the name of the factory of a ``defaultdict``; None if the factory is not one of ``_FACTORIES``."""
    return next((name for name, factory in _FACTORIES.items() if factory is value.default_factory), None)


def _plain_bounds(value: range | slice) -> bool:
    return all(bound is None or type(bound) is int for bound in (value.start, value.stop, value.step))


def _numpy(value: Any, path: str) -> Any:
    array = np.asarray(value)
    if array.dtype.kind not in _NUMPY_KINDS or type(value) not in (np.ndarray, array.dtype.type):
        raise CheckpointError(
            f"{path} is a {type(value).__name__} of dtype {array.dtype}, which cannot be saved without pickle; convert it"
        )
    tag = "ndarray" if type(value) is np.ndarray else "numpy"
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {_TAG: tag, "dtype": array.dtype.str, "shape": list(array.shape), "base64": data}


# -- decoding ---------------------------------------------------------------------------------------------------------


class Decoder:
    """A decoder of the JSON forms that ``Encoder`` makes.

    Args:
        tensor: Function that returns the tensor of a name in the JSON.
        path: Path of the index file, for messages.
        may_unpickle: Whether to read pickles, which can run any code, instead of raising an error.
    """

    def __init__(self, tensor: Callable[[str], torch.Tensor], path: str, may_unpickle: bool = False) -> None:
        self._tensor = tensor
        self._path = path
        self._may_unpickle = may_unpickle

    def decode(self, data: Any) -> Any:
        """Return the value of a JSON form.

        Raises:
            CheckpointError: A tag is unknown or has wrong contents, or there is a pickle and ``may_unpickle`` is false.
        """
        if not isinstance(data, (list, dict)):
            return data
        with reading(f"a saved value in {self._path}", CheckpointError):  # reports values that are nested too deeply
            if isinstance(data, list):
                return [self.decode(item) for item in data]
            if _TAG not in data:
                return {key: self.decode(item) for key, item in data.items()}
        tag = data[_TAG]
        reader = self._readers().get(tag) if isinstance(tag, str) else None
        if tag == "pickle" and not self._may_unpickle:
            raise CheckpointError(
                f"{self._path} holds pickled values, and reading a pickle can run any code. If you trust the source of this file, "
                f"set {PICKLE_KEY} to true in the configuration"
            )
        if reader is None:
            raise CheckpointError(f"{self._path}: unknown tag {tag!r} in a saved value; install a newer hf_zero")
        with reading(f"a saved value with tag {tag!r} in {self._path}", CheckpointError):
            return reader(data)

    def _readers(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {
            "float": lambda data: _FLOATS[data["value"]],
            "tensor": lambda data: self._tensor(data["name"]),
            "pickle": lambda data: unpickled(base64.b64decode(data["base64"])),
            "scalar": lambda data: _read_scalar(self.decode(data["value"]), DTYPES[data["dtype"]], data.get("shape", [])),
            "ndarray": _read_array,
            "numpy": lambda data: _read_array(data)[()],
            "bytes": lambda data: base64.b64decode(data["base64"]),
            "bytearray": lambda data: bytearray(base64.b64decode(data["base64"])),
            "complex": lambda data: complex(*(float(part) for part in data["value"])),
            "range": lambda data: range(*data["value"]),
            "slice": lambda data: slice(*data["value"]),
            "dtype": lambda data: _read_dtype(data["value"]),
            "device": lambda data: torch.device(data["value"]),
            "path": lambda data: pathlib.Path(data["value"]),
            "datetime": lambda data: datetime.datetime.fromisoformat(data["value"]),
            "date": lambda data: datetime.date.fromisoformat(data["value"]),
            "time": lambda data: datetime.time.fromisoformat(data["value"]),
            "timedelta": lambda data: datetime.timedelta(*data["value"]),
            "deque": lambda data: deque(self.decode(data["items"]), data["maxlen"]),
            "Namespace": lambda data: argparse.Namespace(**self.decode(data["items"])),
            "SimpleNamespace": lambda data: types.SimpleNamespace(**self.decode(data["items"])),
            "defaultdict": lambda data: defaultdict(_FACTORIES[data["factory"]], self.decode(data["items"])),
            "Counter": lambda data: Counter(self.decode(data["items"])),
            "tuple": lambda data: tuple(self.decode(data["items"])),
            "size": lambda data: torch.Size(data["items"]),
            "set": lambda data: set(self.decode(data["items"])),
            "frozenset": lambda data: frozenset(self.decode(data["items"])),
            "dict": lambda data: {self.decode(key): self.decode(item) for key, item in data["items"]},
            "rebuilt": lambda data: _class_of(data["class"])(**self.decode(data["items"])),
            "OrderedDict": lambda data: OrderedDict((self.decode(key), self.decode(item)) for key, item in data["items"]),
        }


def _class_of(name: str) -> Any:
    """Return the class ``name`` of ``_REBUILT``; its module is imported.

    Raises:
        CheckpointError: The library is not installed.
    """
    if name not in _REBUILT:
        raise ValueError(f"objects of {name} are not rebuilt")
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint has objects of {name}: install {module.partition('.')[0]} to read it") from error


def _read_scalar(value: Any, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if shape != [1] * len(shape) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{shape!r} is not a shape of one number")
    made = torch.tensor(value, dtype=dtype).view(shape)
    if made.item() != value and not (isinstance(value, float) and math.isnan(value)):
        raise ValueError(f"{value!r} is not a value of {dtype}")
    return made


def _read_array(data: dict[str, Any]) -> Any:
    dtype = np.dtype(data["dtype"])
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"dtype {dtype} is not allowed")
    return np.frombuffer(base64.b64decode(data["base64"]), dtype=dtype).reshape(data["shape"]).copy()


def _read_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is not a dtype")
    return dtype
