"""Changes to valid files: bits, lengths, numbers, names, kinds, entries that come twice, and pickles that try something.

All take a ``random.Random`` (Hypothesis gives one that it can repeat and make simpler) and leave what they are given as it is.
"""

from __future__ import annotations

import copy
import io
import pickletools
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    -1, -(2**63), 2**31, 2**33, 2**62, 2**63, 2**70, 10**12, 10**40, -0.5, 1e300, -1e300, float("nan"), float("inf"), float("-inf"), 0.1,
)  # fmt: skip
# Another kind of value than a number, text, list or object that was there.
KINDS: tuple[Any, ...] = ("boom", "", "../../etc/passwd", "\0", "ü" * 40, [], {}, [[]], {"$": "boom"}, None, [1, 2, 3], "1")
TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "U16", "U8", "BOOL", "C64", "O8")
HOSTILE_NAMES = (
    "os system", "builtins eval", "builtins exec", "builtins getattr", "builtins range", "builtins set", "builtins bytearray",
    "builtins __import__", "subprocess Popen", "posix system", "torch load", "torch.storage _load_from_bytes",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "torch.hub load", "numpy.core.multiarray _reconstruct",
    "collections OrderedDict", "torch FloatStorage", "torch.storage UntypedStorage", "torch Size", "functools partial",
    "operator attrgetter", "copyreg _reconstructor", "torch Tensor",
)  # fmt: skip


# -- bytes --------------------------------------------------------------------------------------------------------------


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """One to four changes of a file: bits, a cut, bytes that are gone, doubled, put in, or that become a length."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        _BYTE_CHANGES[random.randrange(len(_BYTE_CHANGES))](changed, random)
    return bytes(changed)


def _flip(data: bytearray, random: Random) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _cut(data: bytearray, random: Random) -> None:
    del data[random.randrange(len(data) + 1) :]


def _remove(data: bytearray, random: Random) -> None:
    start = random.randrange(len(data) + 1)
    del data[start : start + random.randint(1, 64)]


def _double(data: bytearray, random: Random) -> None:
    start = random.randrange(len(data) + 1)
    data[start:start] = data[start : start + random.randint(1, 64)]


def _insert(data: bytearray, random: Random) -> None:
    start = random.randrange(len(data) + 1)
    data[start:start] = bytes(random.randrange(256) for _ in range(random.randint(1, 8)))


def _length(data: bytearray, random: Random) -> None:
    """Eight, four or two bytes that somebody may take for a length."""
    size = random.choice((8, 4, 2))
    start = random.choice((0, random.randrange(len(data) + 1)))
    value = random.choice((0, 1, 2**7, 2**15, 2**31 - 1, 2**33, 2**40, 2**63 - 1, 2**64 - 1))
    data[start : start + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")


_BYTE_CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (_flip, _flip, _cut, _remove, _double, _insert, _length)


# -- text ---------------------------------------------------------------------------------------------------------------


def mutate_text(text: str, random: Random, tokens: tuple[str, ...] = ('"', "{", "}", "[", "]", ",", ":", "=", "#", " ", "\n", "\\")) -> str:
    """One to four changes of a text: a character, a run of one token, a cut, a line twice, a number that is another."""
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(text) + 1)
        kind = random.randrange(5)
        if kind == 0:
            text = text[:place] + random.choice(tokens) + text[place + 1 :]
        elif kind == 1:
            text = text[:place] + random.choice(tokens) * random.choice((1, 2, 50)) + text[place:]
        elif kind == 2:
            text = text[:place]
        elif kind == 3:
            lines = text.split("\n")
            line = random.randrange(len(lines))
            text = "\n".join([*lines[: line + 1], *lines[line:]])
        else:
            digits = [position for position, character in enumerate(text) if character.isdigit()]
            if digits:
                position = random.choice(digits)
                text = text[:position] + str(random.choice(NUMBERS)) + text[position + 1 :]
    return text


# -- values (of JSON, or of a pickle) -------------------------------------------------------------------------------------

Path = tuple[Any, ...]


def places_in(value: Any, before: Path = ()) -> list[Path]:
    """The paths of all values inside ``value``, containers too."""
    found: list[Path] = [before] if before else []
    if isinstance(value, dict):
        inner: Any = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        return found
    for key, item in inner:
        found += places_in(item, (*before, key))
    return found


def mutate_value(value: Any, random: Random) -> tuple[Any, Path, str]:
    """A copy of dicts and lists with one change.

    Returns:
        The copy, the path of what changed, and how: ``number``, ``kind``, ``type``, ``removed``, ``renamed``, ``twice``, ``swapped``.
    """
    value = copy.deepcopy(value)
    path = random.choice(places_in(value))
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, present = path[-1], parent[path[-1]]
    hows = ["number", "kind"] + (["removed", "renamed"] if isinstance(parent, dict) else ["twice", "removed", "swapped"])
    how = "type" if present in TYPES and random.random() < 0.7 else random.choice(hows)
    if how == "number" or how == "kind":
        choices = [other for other in (NUMBERS if how == "number" else KINDS) if type(other) is not type(present) or other != present]
        parent[key] = copy.deepcopy(random.choice(choices))
    elif how == "type":
        parent[key] = random.choice([name for name in TYPES if name != present])
    elif how == "removed":
        del parent[key]
    elif how == "renamed":
        parent[f"{key}x" if isinstance(key, str) else -1] = parent.pop(key)
    elif how == "twice":
        parent.insert(key, copy.deepcopy(present))
    else:
        other = random.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    return value, path, how


# -- pickles ------------------------------------------------------------------------------------------------------------


def mutate_pickle(data: bytes, random: Random) -> bytes:
    """One to three changes between instructions: one that is gone, doubled, moved, given another name, or an attempt at something."""
    for _ in range(random.randint(1, 3)):
        try:
            starts = [position or 0 for _, _, position in pickletools.genops(data)]
        except Exception:
            return mutate_bytes(data, random)
        place = random.choice(starts)
        following = next((start for start in starts if start > place), len(data))
        kind = random.randrange(4)
        if kind == 0:
            data = data[:place] + data[following:]
        elif kind == 1:
            data = data[:following] + data[place:following] * random.choice((1, 2, 30)) + data[following:]
        elif kind == 2:
            data = data[:place] + random.choice(ATTEMPTS) + data[place:]
        else:
            data = _renamed(data, random)
    return data


def _renamed(data: bytes, random: Random) -> bytes:
    globals_ = [(position or 0, arg) for opcode, arg, position in pickletools.genops(data) if opcode.name == "GLOBAL"]
    if not globals_:
        return data
    position, name = random.choice(globals_)
    length = 1 + len(str(name).encode()) + 1
    return data[:position] + _global(random.choice(HOSTILE_NAMES)) + data[position + length :]


def _global(name: str) -> bytes:
    module, _, attribute = name.partition(" ")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def _long(value: int) -> bytes:
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _doubling(steps: int) -> bytes:
    """A list that holds the one before twice, again and again."""
    made = b"]"
    for step in range(steps):
        made += b"r" + (100 + step).to_bytes(4, "little") + b"]" + (b"j" + (100 + step).to_bytes(4, "little")) * 2
        made += b"\x86\x85R" if step % 7 == 6 else b"\x86\x86"
    return made


ATTEMPTS: tuple[bytes, ...] = (
    # runs code, or changes what it finds
    _global("os system") + b"X\x06\x00\x00\x00exit 3\x85R",
    _global("torch._utils _rebuild_tensor_v2") + b"N}X\x0c\x00\x00\x00__defaults__K\x05\x85s\x86b",
    _global("torch._utils _rebuild_tensor_v2") + b"N}X\x0c\x00\x00\x00__defaults__K\x05s\x86b",
    _global("torch FloatStorage") + b"N}X\x06\x00\x00\x00_dtypeK\x05s\x86b",
    _global("collections OrderedDict") + b")R}X\x05\x00\x00\x00itemsK\x01sb",
    _global("builtins getattr") + _global("builtins range") + b"X\x05\x00\x00\x00index\x86R",
    b"(X\x02\x00\x00\x00lsios\nsystem\n",
    b"(" + _global("os system") + b"X\x02\x00\x00\x00lso",
    # takes room
    _global("builtins set") + _global("builtins range") + _long(2**40) + b"\x85R\x85R",
    _global("builtins bytearray") + _long(2**40) + b"\x85R",
    _global("torch Size") + b"(" + _long(2**40) * 3 + b"t\x85R",
    b"\x8e" + (2**40).to_bytes(8, "little"),
    b"\x96" + (2**40).to_bytes(8, "little"),
    b"N" + b"r\xff\xff\xff\x7f",
    b"\x8b" + (2**31 - 1).to_bytes(4, "little"),
    b"\x95" + (2**62).to_bytes(8, "little"),
    _doubling(60),
    b"(" * 5000,
    b"]" * 5000 + b"a" * 4999,
    b")" + b"\x85" * 5000,
    # names what is not there
    b"j\xff\xff\xff\xff", b"0" * 50, b"t", b"\x82\x01", b"Q", b"P9\n", b"\x97", b"\x93", b"\x81", b"R", b"b", b"u", b"e", b"\x90", b"2" * 9,
)  # fmt: skip


def repacked(data: bytes, change: Any) -> bytes:
    """The archive with another data.pkl."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for member in old.infolist():
            inner = old.read(member)
            new.writestr(member.filename, change(inner) if member.filename.endswith("data.pkl") else inner)
    return made.getvalue()
