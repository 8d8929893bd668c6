"""Read pickles without running code that they name: plain values and tensors are built, other objects become inert records.

[Note: our own machine] ``pickle.Unpickler`` with an allow-list of names is not safe enough. Its instructions have side effects (``BUILD``
sets attributes of any object on the stack, even of a torch function), allocate sizes that the pickle chooses, and can expand shared
parts to exponential size. So this module decodes a pickle with ``pickletools`` and executes only the instructions that data need, on plain
values. The bytes that copies take are limited to a multiple of the pickle's size.
"""

from __future__ import annotations

import pickletools  # nosec B403
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

_MOST_COPIED = 4  # limit of copied bytes, as a multiple of the pickle's size
_SPARE = 1 << 20
_ITEM_BYTES = 8  # size of a reference in a list
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # Python 2's names of modules
_KEYS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
_ENCODINGS = ("latin1", "latin-1", "utf-8", "utf8", "ascii")


class Inert:
    """A placeholder for an object whose class is not loaded; it holds the object's data and has no behaviour.

    Attributes:
        kind: Module and name of the class, joined by a dot.
        arguments: Arguments with which the pickle constructs the object.
        state: Attributes of the object; the key ``items`` holds items that the pickle appends to it.
    """

    __slots__ = ("kind", "arguments", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...], state: dict[str, Any]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state = state

    def __repr__(self) -> str:
        return f"<object of {self.kind}>"

    def get(self, name: str, default: Any = None) -> Any:
        """Return the object's attribute ``name``, or ``default`` if there is none."""
        return self.state.get(name, default)


@dataclass(frozen=True)
class Name:
    """A class or function that a pickle names; only ``Names.call`` can call it, and it is immutable.

    Attributes:
        kind: Module and name of the class or function, joined by a dot.
        make: Function that returns the value of a call; None if a call returns an ``Inert``.
    """

    kind: str
    make: Callable[..., Any] | None


class Names:
    """The allow-list of names for one pickle, and the limit of the bytes that it may copy.

    Attributes:
        most: Largest number of bytes that may be copied, and largest number of values after shared parts are expanded.

    Args:
        nbytes: Size of the pickle in bytes.
        more: Functions to call for further allowed names, by (module, name).
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
        """Return the object of a global name: a dtype or layout of torch, else a ``Name``.

        Raises:
            TypeError: ``module`` or ``name`` is not a str.
        """
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name is not text")
        key = (_OLD_MODULES.get(module, module), name)
        if key not in self._known:
            constant = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
            is_constant = isinstance(constant, (torch.dtype, torch.layout))
            self._known[key] = constant if is_constant else Name(".".join(key), self._makers.get(key))
        return self._known[key]

    def call(self, what: Any, arguments: Any, keywords: Mapping[str, Any] | None = None) -> Any:
        """Return the result of a call in a pickle: a plain value or tensor if the name is allowed, else an ``Inert``.

        Raises:
            Exception: The arguments do not fit the allowed name; the error may have any type.
        """
        if not isinstance(what, Name) or not isinstance(arguments, tuple):
            raise TypeError(f"it calls a {type(what).__name__}")
        if what.make is None:
            self.spend(len(keywords or ()))
            return Inert(what.kind, arguments, dict(keywords or {}))
        if keywords:
            raise TypeError(f"it calls {what.kind} with keywords")
        return what.make(*arguments)

    def spend(self, nbytes: int) -> None:
        """Count ``nbytes`` copied bytes.

        Raises:
            ValueError: All copies together exceed ``most`` bytes.
        """
        self._left -= nbytes
        if self._left < 0:
            raise ValueError(f"its copies take more than {self.most} bytes")

    def _sequence(self, items: Any) -> Any:
        if type(items) not in (list, tuple, torch.Size):
            raise TypeError(f"it has a {type(items).__name__} where a list is expected")
        self.spend(_ITEM_BYTES * len(items))
        return items

    def _pairs(self, pairs: Any) -> list[tuple[Any, Any]]:
        return [(checked_key(key), value) for key, value in self._sequence(pairs)]

    def _encoded(self, text: Any = "", encoding: Any = "latin1") -> bytes:
        """Return bytes that an older pickle protocol has encoded as text."""
        if not isinstance(text, (str, bytes)) or encoding not in _ENCODINGS:
            raise TypeError(f"it makes bytes from a {type(text).__name__} with the encoding {str(encoding)[:20]}")
        self.spend(len(text))
        return text if isinstance(text, bytes) else text.encode(encoding)


def checked_key(key: Any) -> Any:
    """Return ``key`` if it has a type whose hash is quick to compute.

    Raises:
        TypeError: ``key`` has another type.
    """
    if isinstance(key, (*_KEYS, Inert)) or (isinstance(key, tuple) and all(isinstance(part, _KEYS) for part in key)):
        return key
    raise TypeError(
        f"it uses a {type(key).__name__} as the key of a dict or as a member of a set; numbers, strings and tuples of these are allowed"
    )


_MOST_BITS = 160  # limit of a whole number
_CONTAINERS = (list, tuple, dict, set, frozenset)


class Machine:
    """An interpreter of one pickle.

    Args:
        names: Allow-list of global names.
        persistent: Function that returns the object of a persistent id; None if the pickle must not have any.
    """

    def __init__(self, names: Names, persistent: Callable[[Any], Any] | None = None) -> None:
        self.names = names
        self.persistent = persistent
        self.stack: list[Any] = []  # values above the last mark
        self._below: list[list[Any]] = []  # values below each mark
        self._memo: dict[int, Any] = {}

    def run(self, source: bytes | BinaryIO) -> Any:
        """Return the value of the pickle at the current position of ``source``, and leave a file positioned after the pickle.

        Raises:
            Exception: The pickle is damaged or uses an unsupported instruction; the error may have any type.
        """
        for opcode, argument, _ in pickletools.genops(source):
            self._step(opcode.name, argument)
        value = self.stack.pop()
        _check_unfolded(value, self.names.most)
        return value

    def _step(self, name: str, argument: Any) -> None:
        if name in _PUSHES:
            if isinstance(argument, int) and argument.bit_length() > _MOST_BITS:
                raise ValueError(f"it has a whole number of {argument.bit_length()} bits, at most {_MOST_BITS} are allowed")
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self._memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self.stack[-1]
        elif name not in ("PROTO", "FRAME", "STOP"):
            action = _ACTIONS.get(name)
            if action is None:
                raise ValueError(f"the pickle instruction {name} is not supported")
            action(self, argument)

    def mark(self) -> None:
        """Push a mark; later values are the items above it."""
        self._below.append(self.stack)
        self.stack = []

    def items(self) -> list[Any]:
        """Remove the last mark and the items above it from the stack, and return the items."""
        items, self.stack = self.stack, self._below.pop()
        return items

    def put(self, value: Any) -> None:
        """Push ``value`` on the stack."""
        self.stack.append(value)


def _check_unfolded(value: Any, most: int) -> None:
    """Refuse a value that is small only because it shares parts, because code that prints or traverses it would visit each part many times.

    Raises:
        ValueError: A traversal as a tree would visit more than ``most`` values.
    """
    sizes: dict[int, int] = {}
    waiting: list[tuple[Any, list[Any] | None]] = [(value, None)]
    while waiting:
        item, parts = waiting.pop()
        if parts is not None:
            sizes[id(item)] = size = 1 + sum(sizes.get(id(part), 1) for part in parts)
            if size > most:
                raise ValueError(f"it shares parts so often that a traversal visits more than {most} values")
        elif id(item) not in sizes and isinstance(item, _CONTAINERS):
            parts = [*item.keys(), *item.values()] if isinstance(item, dict) else list(item)
            sizes[id(item)] = 1  # size to use if the container occurs inside itself
            waiting.append((item, parts))
            waiting.extend((part, None) for part in parts if isinstance(part, _CONTAINERS))


# -- instructions -----------------------------------------------------------------------------------------------------

_PUSHES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.items()


def _tuple(machine: Machine, count: int) -> None:
    items = tuple(machine.stack[-count:])
    if len(items) != count:
        raise ValueError("the stack is too short")
    machine.stack[-count:] = [items]


def _append(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, Inert):
        target = target.state.setdefault("items", [])
    if type(target) is not list:
        raise TypeError(f"it appends items to a {type(target).__name__}")
    target.extend(items)


def _fill(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, Inert):
        target = target.state
    if type(target) not in (dict, OrderedDict, Counter):
        raise TypeError(f"it sets keys of a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[checked_key(key)] = value


def _dict(machine: Machine) -> None:
    items = machine.items()
    machine.put({})
    _fill(machine, items)


def _add(machine: Machine) -> None:
    items, target = machine.items(), machine.stack[-1]
    if type(target) is not set:
        raise TypeError(f"it adds members to a {type(target).__name__}")
    target.update(checked_key(item) for item in items)


def _build(machine: Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if isinstance(target, (OrderedDict, Counter)):
        return  # ignore attributes of a dict, such as the versions of a state dict
    if not isinstance(target, Inert):
        raise TypeError(f"it sets attributes of a {type(target).__name__}")
    slotted = type(state) is tuple and len(state) == 2 and type(state[1]) is dict
    for part in state if slotted else (state,):
        if type(part) is dict:
            machine.names.spend(len(part))
            target.state.update(part)
        elif part is not None:
            target.state["state"] = part


def _reduce(machine: Machine) -> None:
    arguments, what = machine.stack.pop(), machine.stack.pop()
    machine.put(machine.names.call(what, arguments))


def _reduce_with_keywords(machine: Machine) -> None:
    keywords, arguments, what = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    if type(keywords) is not dict:
        raise TypeError("the keywords of a call are not a dict")
    machine.put(machine.names.call(what, arguments, keywords))


def _object(machine: Machine) -> None:
    what, *arguments = machine.items()
    machine.put(machine.names.call(what, tuple(arguments)))


def _global(machine: Machine, name: Any) -> None:
    machine.put(machine.names.find(*str(name).split(" ", 1)))


def _instance(machine: Machine, name: Any) -> None:
    arguments = tuple(machine.items())
    _global(machine, name)
    machine.put(machine.names.call(machine.stack.pop(), arguments))


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.put(machine.names.find(module, name))


def _persistent(machine: Machine, pid: Any) -> None:
    if machine.persistent is None:
        raise ValueError("it refers to an object outside of the pickle by a persistent id")
    machine.put(machine.persistent(pid))


_ACTIONS: dict[str, Callable[[Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.mark(),
    "POP": lambda machine, _: _pop(machine),
    "POP_MARK": lambda machine, _: machine.items().clear(),
    "DUP": lambda machine, _: machine.put(machine.stack[-1]),
    "TUPLE": lambda machine, _: machine.put(tuple(machine.items())),
    "TUPLE1": lambda machine, _: _tuple(machine, 1),
    "TUPLE2": lambda machine, _: _tuple(machine, 2),
    "TUPLE3": lambda machine, _: _tuple(machine, 3),
    "LIST": lambda machine, _: machine.put(machine.items()),
    "DICT": lambda machine, _: _dict(machine),
    "FROZENSET": lambda machine, _: machine.put(frozenset(checked_key(item) for item in machine.items())),
    "APPEND": lambda machine, _: _append(machine, [machine.stack.pop()]),
    "APPENDS": lambda machine, _: _append(machine, machine.items()),
    "SETITEM": lambda machine, _: _fill(machine, [machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: _fill(machine, machine.items()),
    "ADDITEMS": lambda machine, _: _add(machine),
    "BUILD": lambda machine, _: _build(machine),
    "REDUCE": lambda machine, _: _reduce(machine),
    "NEWOBJ": lambda machine, _: _reduce(machine),
    "NEWOBJ_EX": lambda machine, _: _reduce_with_keywords(machine),
    "OBJ": lambda machine, _: _object(machine),
    "INST": _instance,
    "GLOBAL": _global,
    "STACK_GLOBAL": lambda machine, _: _stack_global(machine),
    "PERSID": _persistent,
    "BINPERSID": lambda machine, _: _persistent(machine, machine.stack.pop()),
}
