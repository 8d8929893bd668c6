"""Reads pickles without running what they name: plain values and tensors come out, objects of other classes become inert records.

[Note: our own machine] ``pickle.Unpickler`` with a list of allowed names is not enough. The instructions themselves call (``BUILD`` sets
attributes of whatever is on the stack, also of a function of torch's), make room for sizes that they name, and unfold shared parts without
end. So the few instructions that data need are carried out here, over what ``pickletools`` decodes, with plain values alone; each copy is
counted against the bytes of the pickle.
"""

from __future__ import annotations

import pickletools  # nosec B403
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

_MOST_COPIED = 4  # times the bytes of the pickle
_SPARE = 1 << 20
_ITEM_BYTES = 8  # of a reference in a list
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # as Python 2 called them
_KEYS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
_ENCODINGS = ("latin1", "latin-1", "utf-8", "utf8", "ascii")


class Inert:
    """Placeholder for an object of a class that is not loaded: holds the data of the pickle, and does nothing.

    Attributes:
        kind: Module and name of the class.
        arguments: Arguments of its construction.
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
        """Return attribute ``name`` of the object."""
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
        more: Functions for further classes and functions of the pickle, by module and name.
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
        """Return the object of a global name: an element type or layout of torch, else a ``Name``.

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
        """Return the result of a call in a pickle: a plain value or tensor, else an ``Inert``.

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
        """Return the bytes that older protocols write as text."""
        if not isinstance(text, (str, bytes)) or encoding not in _ENCODINGS:
            raise TypeError(f"bytes from a {type(text).__name__}, encoding {str(encoding)[:20]}")
        self.spend(len(text))
        return text if isinstance(text, bytes) else text.encode(encoding)


def checked_key(key: Any) -> Any:
    """Return ``key`` if it can be hashed in a short time.

    Raises:
        TypeError: Another kind of key.
    """
    if isinstance(key, (*_KEYS, Inert)) or (isinstance(key, tuple) and all(isinstance(part, _KEYS) for part in key)):
        return key
    raise TypeError(f"a {type(key).__name__} as a key")


_MOST_BITS = 160  # of a whole number
_CONTAINERS = (list, tuple, dict, set, frozenset)


class Machine:
    """Carries out one pickle.

    Args:
        names: Objects of its global names.
        persistent: Gives the object of a persistent id; None: there are none.
    """

    def __init__(self, names: Names, persistent: Callable[[Any], Any] | None = None) -> None:
        self.names = names
        self.persistent = persistent
        self.stack: list[Any] = []  # above the last mark
        self._below: list[list[Any]] = []  # what lies under each mark
        self._memo: dict[int, Any] = {}

    def run(self, source: bytes | BinaryIO) -> Any:
        """Return the value of the pickle that begins at the position of ``source``; a file is left positioned behind its end.

        Raises:
            Exception: Of any kind, when it is broken or asks for what is not done.
        """
        for opcode, argument, _ in pickletools.genops(source):
            self._step(opcode.name, argument)
        value = self.stack.pop()
        _check_unfolded(value, self.names.most)
        return value

    def _step(self, name: str, argument: Any) -> None:
        if name in _PUSHES:
            if isinstance(argument, int) and argument.bit_length() > _MOST_BITS:
                raise ValueError(f"a whole number of {argument.bit_length()} bits")
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
                raise ValueError(f"the instruction {name} is not carried out")
            action(self, argument)

    def mark(self) -> None:
        """Begins a list of items."""
        self._below.append(self.stack)
        self.stack = []

    def items(self) -> list[Any]:
        """Return the items above the last mark of the stack, and remove both."""
        items, self.stack = self.stack, self._below.pop()
        return items

    def put(self, value: Any) -> None:
        """Puts a value on the stack."""
        self.stack.append(value)


def _check_unfolded(value: Any, most: int) -> None:
    """Refuse values that are small only because they share parts: code that prints or walks them would meet each part many times.

    Raises:
        ValueError: Walked as a tree there are more than ``most`` values.
    """
    sizes: dict[int, int] = {}
    waiting: list[tuple[Any, list[Any] | None]] = [(value, None)]
    while waiting:
        item, parts = waiting.pop()
        if parts is not None:
            sizes[id(item)] = size = 1 + sum(sizes.get(id(part), 1) for part in parts)
            if size > most:
                raise ValueError("it shares parts so often that it unfolds without end")
        elif id(item) not in sizes and isinstance(item, _CONTAINERS):
            parts = [*item.keys(), *item.values()] if isinstance(item, dict) else list(item)
            sizes[id(item)] = 1  # met again inside itself
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
        raise TypeError(f"items for a {type(target).__name__}")
    target.extend(items)


def _fill(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, Inert):
        target = target.state
    if type(target) not in (dict, OrderedDict, Counter):
        raise TypeError(f"keys for a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[checked_key(key)] = value


def _dict(machine: Machine) -> None:
    items = machine.items()
    machine.put({})
    _fill(machine, items)


def _add(machine: Machine) -> None:
    items, target = machine.items(), machine.stack[-1]
    if type(target) is not set:
        raise TypeError(f"members for a {type(target).__name__}")
    target.update(checked_key(item) for item in items)


def _build(machine: Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if isinstance(target, (OrderedDict, Counter)):
        return  # attributes of a dict (a state dict's versions): left out
    if not isinstance(target, Inert):
        raise TypeError(f"state for a {type(target).__name__}")
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
        raise TypeError("keywords that are no dict")
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
        raise ValueError("it refers to something outside of it")
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
