"""Reads pickles without running what they name: plain values and tensors come out, objects of other classes become inert records.

[Note: our own machine] ``pickle.Unpickler`` with a list of allowed names is not enough. The instructions themselves call (``BUILD`` sets
attributes of whatever is on the stack, also of a function of torch's), make room for sizes that they name, and unfold shared parts without
end. So the few instructions that data need are carried out here, over what ``pickletools`` decodes, with plain values alone; each copy is
counted against the bytes of the pickle.
"""

from __future__ import annotations

import pickletools  # nosec B403
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO

from hf_zero.checkpoint.convert.pickle_names import Inert, Names, checked_key

_MOST_BITS = 160  # of a whole number
_CONTAINERS = (list, tuple, dict, set, frozenset)


class Machine:
    """Carries out one pickle.

    Args:
        names: What its names stand for.
        persistent: Gives the object of a persistent id; None: there are none.
    """

    def __init__(self, names: Names, persistent: Callable[[Any], Any] | None = None) -> None:
        self.names = names
        self.persistent = persistent
        self.stack: list[Any] = []  # above the last mark
        self._below: list[list[Any]] = []  # what lies under each mark
        self._memo: dict[int, Any] = {}

    def run(self, source: bytes | BinaryIO) -> Any:
        """The value of the pickle that begins at the position of ``source``; a file is left behind its end.

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
        """What lies above the last mark; both go."""
        items, self.stack = self.stack, self._below.pop()
        return items

    def put(self, value: Any) -> None:
        """Puts a value on the stack."""
        self.stack.append(value)


def _check_unfolded(value: Any, most: int) -> None:
    """Refuses values that are small because they share parts: whoever prints or walks them meets each part many times.

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
