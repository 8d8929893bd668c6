"""Files that are no text: pipes, devices, links, holes, and short texts that would become large values."""

from __future__ import annotations

import functools
import gzip
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

GIBIBYTE = 1 << 30


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # its path may be longer than such an address
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


def _sparse(path: Path, begin: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(GIBIBYTE)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


@functools.cache
def _bomb(mebibytes: int) -> bytes:
    return gzip.compress(b"[" + b" " * (mebibytes << 20) + b"]", 1)


SPECIALS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "socket": _socket,
    "link to zeros": _link("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a pipe": lambda path: (os.mkfifo(path.with_name(f"{path.name}_pipe")), path.symlink_to(f"{path.name}_pipe")),
    "link to a process": _link("/proc/self/mem"),
    "sparse": _sparse,
    "sparse text": lambda path: _sparse(path, b'{"a": 1}\n'),
    "2 MB of a hole": lambda path: (path.touch(), os.truncate(path, 2 << 20)),
    "deep lists": lambda path: path.write_bytes(b"[" * 200_000),
    "deep blocks": lambda path: path.write_bytes(b'{"a":' * 100_000),
    "many blocks": lambda path: path.write_bytes(b"[" + b"{}," * (3 << 20) + b"{}]"),
    "many lists": lambda path: path.write_bytes(b'{"a": [' + b"[]," * 1_000_000 + b"[]]}"),
    "a huge number": lambda path: path.write_bytes(b'{"a": ' + b"9" * 1_000_000 + b"}"),
    "endless key": lambda path: path.write_bytes(b'{"' + b"k" * (4 << 20) + b'": 1}'),
    "escapes": lambda path: path.write_bytes(b'{"\x1b]0;title\x07\\u001b[2J\xc2\x9b": "\xe2\x80\xae\\ud800"}'),
    "escapes alone": lambda path: path.write_bytes(b"\x1b]0;title\x07\x9b\r\n\x1b[2J"),
    "zeros": lambda path: path.write_bytes(b"\0" * 5000),
    "no text": lambda path: path.write_bytes(bytes(range(256)) * 20),
    "empty": Path.touch,
    "300 letters": lambda path: path.write_text("x" * 300),
    "a bomb of gzip": lambda path: path.write_bytes(_bomb(256)),
    "bombs of gzip in a row": lambda path: path.write_bytes(_bomb(16) * 20),
    "half of a gzip": lambda path: path.write_bytes(gzip.compress(b"[1, 2]" * 50)[:-12]),
    "aliases": lambda path: path.write_text(
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    ),
}


def put(path: Path, kind: str) -> None:
    """Puts the file ``kind`` in the place of ``path``."""
    remove(path)
    remove(path.with_name(f"{path.name}_pipe"))
    SPECIALS[kind](path)


def remove(path: Path) -> None:
    """Removes whatever ``path`` is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def written_bytes(path: Path) -> int:
    """What a file has cost its sender: bytes without holes; 0 of what is no file."""
    return min(path.stat().st_size, path.stat().st_blocks * 512) if path.is_file() else 0
