"""What becomes of the classes and functions that a pickle names: plain values are made, everything else is kept as an inert record."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_MOST_COPIED = 4  # times the bytes of the pickle
_SPARE = 1 << 20
_ITEM_BYTES = 8  # of a reference in a list
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # as Python 2 called them
_KEYS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
_ENCODINGS = ("latin1", "latin-1", "utf-8", "utf8", "ascii")


class Inert:
    """Stands for an object of a class that is not loaded: keeps what the pickle says of it, does nothing.

    Attributes:
        kind: Module and name of the class.
        arguments: What it was constructed with.
        state: Its attributes; under ``items`` what was appended to it.
    """

    __slots__ = ("kind", "arguments", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...], state: dict[str, Any]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state = state

    def __repr__(self) -> str:
        return f"<object of {self.kind}>"

    def get(self, name: str, default: Any = None) -> Any:
        """Attribute ``name`` of the object."""
        return self.state.get(name, default)


@dataclass(frozen=True)
class Name:
    """A class or function that a pickle names; it is called through ``Names`` alone, and nothing about it can be set.

    Attributes:
        kind: Module and name.
        make: Makes the value of a call; None: an ``Inert`` is made.
    """

    kind: str
    make: Callable[..., Any] | None


class Names:
    """The allow-list of one pickle, and what its copies may cost.

    Attributes:
        most: Bytes that copies, and items that shared parts, may come to.

    Args:
        nbytes: Bytes of the pickle.
        more: What to do for further classes and functions, by module and name.
    """

    def __init__(self, nbytes: int, more: Mapping[tuple[str, str], Callable[..., Any]] | None = None) -> None:
        self.most = self._left = _MOST_COPIED * nbytes + _SPARE
        self._known: dict[tuple[str, str], Any] = {}
        self._makers: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): lambda pairs=(): OrderedDict(self._pairs(pairs)),
            ("collections", "Counter"): lambda counts=None: Counter(dict(self._pairs(list((counts or {}).items())))),
            ("builtins", "set"): lambda items=(): {checked_key(item) for item in self._sequence(items)},
            ("builtins", "frozenset"): lambda items=(): frozenset(checked_key(item) for item in self._sequence(items)),
            ("builtins", "complex"): lambda real, imaginary: complex(float(real), float(imaginary)),
            ("builtins", "slice"): slice,
            ("builtins", "bytearray"): lambda *given: bytearray(self._encoded(*given)),
            ("_codecs", "encode"): self._encoded,
            ("copyreg", "_reconstructor"): lambda cls, base, state: self.call(cls, ()),
            ("torch", "Size"): lambda sizes: torch.Size(self._sequence(sizes)),
            ("torch", "device"): torch.device,
            **(more or {}),
        }

    def find(self, module: Any, name: Any) -> Any:
        """What a name stands for: an element type or layout of torch, else a ``Name``.

        Raises:
            TypeError: It is no text.
        """
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is no text")
        key = (_OLD_MODULES.get(module, module), name)
        if key not in self._known:
            constant = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
            is_constant = isinstance(constant, (torch.dtype, torch.layout))
            self._known[key] = constant if is_constant else Name(".".join(key), self._makers.get(key))
        return self._known[key]

    def call(self, what: Any, arguments: Any, keywords: Mapping[str, Any] | None = None) -> Any:
        """What a call in a pickle gives: a plain value or tensor, else an ``Inert``.

        Raises:
            Exception: Of any kind, when the arguments are not those of a plain value.
        """
        if not isinstance(what, Name) or not isinstance(arguments, tuple):
            raise TypeError(f"a {type(what).__name__} is called")
        if what.make is None:
            self.spend(len(keywords or ()))
            return Inert(what.kind, arguments, dict(keywords or {}))
        if keywords:
            raise TypeError(f"{what.kind} is called with keywords")
        return what.make(*arguments)

    def spend(self, nbytes: int) -> None:
        """Counts what is copied.

        Raises:
            ValueError: It is many times what the pickle has.
        """
        self._left -= nbytes
        if self._left < 0:
            raise ValueError(f"its copies unfold to more than {self.most} bytes")

    def _sequence(self, items: Any) -> Any:
        if type(items) not in (list, tuple, torch.Size):
            raise TypeError(f"a {type(items).__name__} where a list is expected")
        self.spend(_ITEM_BYTES * len(items))
        return items

    def _pairs(self, pairs: Any) -> list[tuple[Any, Any]]:
        return [(checked_key(key), value) for key, value in self._sequence(pairs)]

    def _encoded(self, text: Any = "", encoding: Any = "latin1") -> bytes:
        """The bytes that older protocols write as text."""
        if not isinstance(text, (str, bytes)) or encoding not in _ENCODINGS:
            raise TypeError(f"bytes from a {type(text).__name__}, encoding {str(encoding)[:20]}")
        self.spend(len(text))
        return text if isinstance(text, bytes) else text.encode(encoding)


def checked_key(key: Any) -> Any:
    """``key`` itself: what can be hashed in no time.

    Raises:
        TypeError: Another kind of key.
    """
    if isinstance(key, (*_KEYS, Inert)) or (isinstance(key, tuple) and all(isinstance(part, _KEYS) for part in key)):
        return key
    raise TypeError(f"a {type(key).__name__} as a key")
