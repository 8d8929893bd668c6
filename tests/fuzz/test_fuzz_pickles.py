"""Files of torch.save, plain pickles and folders of torch.distributed.checkpoint: nothing is run or changed, and damage is noticed."""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from hf_zero.checkpoint.convert.pickles import Inert
from hf_zero.checkpoint.convert.torch_files import load_pickle, load_torch_file
from hf_zero.errors import CheckpointError
from tests.fuzz.guard import Refused, fuzzed, guarded
from tests.fuzz.mutations import ATTEMPTS, mutate_bytes, mutate_pickle, repacked
from tests.fuzz.summaries import plain

WATCHED = (
    (torch._utils._rebuild_tensor_v2, "__defaults__"),
    (torch._utils._rebuild_tensor_v2, "__kwdefaults__"),
    (torch._utils._rebuild_tensor_v2, "__dict__"),
    (torch._utils._rebuild_parameter, "__defaults__"),
    (torch.FloatStorage, "_dtype"),
    (OrderedDict, "items"),
)


def _watched() -> list[str]:
    """What a pickle that sets attributes would change in this process."""
    return [repr(getattr(owner, name, None)) for owner, name in WATCHED]


def _content() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2).bfloat16())
    return {
        "module": model.state_dict(), "param": torch.nn.Parameter(torch.ones(3)), "view": torch.arange(10)[2:8:2], "t": torch.ones(2, 3).T,
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}], "counts": Counter("aab"), "set": {1, 2}, "bytes": b"\xff\x00",
        "size": torch.Size([1, 2]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "none": None, "class": pickle.PickleError("x"),
    }  # fmt: skip


class Files:
    """A folder, and files in it by what they are: how they are read, and what of."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.data: dict[str, bytes] = {}
        for name, options in {"archive": {}, "legacy": {"_use_new_zipfile_serialization": False}, "five": {"pickle_protocol": 5}}.items():
            file = io.BytesIO()
            torch.save(_content(), file, **options)
            self.data[name] = file.getvalue()
        plain_content = {"a": [1, 2.5, None, True, "ü", b"x", -(2**40)], "b": (1, (2, (3,))), "c": {1: {2: 3}}, "d": {1, 2}, "e": 1j}
        self.data |= {f"plain{protocol}": pickle.dumps(plain_content, protocol) for protocol in range(6)}
        self.expected = {name: plain(self.read(name, data)) for name, data in self.data.items()}

    def read(self, name: str, data: bytes) -> Any:
        path = self.folder / f"{name}.pt"
        path.unlink(missing_ok=True)  # a mapped file must not change
        path.write_bytes(data)
        return load_pickle(path) if name.startswith("plain") else load_torch_file(path)

    def __repr__(self) -> str:
        return "files of torch.save and pickle"


@pytest.fixture(scope="module")
def copies(workspace: Path) -> Files:
    return Files(workspace)


def check_bytes(random: Random, copies: Files) -> None:
    """Archives have checksums: what is read is what was written. The other forms have none."""
    name = random.choice(sorted(copies.data))
    data = mutate_bytes(copies.data[name], random)
    before = _watched()
    found = guarded(lambda: plain(copies.read(name, data)), len(data), CheckpointError, f"{name}.pt")
    assert _watched() == before
    if name in ("archive", "five") and not isinstance(found, Refused):
        assert found == copies.expected[name]


def check_instructions(random: Random, copies: Files) -> None:
    """Changed instructions under a checksum that fits: anything may come out, of plain values, tensors and inert records."""
    name = random.choice(("archive", "five", "legacy", "plain0", "plain2", "plain4", "plain5"))
    data = copies.data[name]
    data = repacked(data, lambda inner: mutate_pickle(inner, random)) if name in ("archive", "five") else mutate_pickle(data, random)
    before = _watched()
    found = guarded(lambda: _allowed(copies.read(name, data)), len(data), CheckpointError, f"{name}.pt")
    assert _watched() == before and (isinstance(found, Refused) or found is None)


def _allowed(value: Any) -> None:
    """Walks everything; a tensor's elements can all be read."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            item.clone()
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting += item
        elif isinstance(item, Inert):
            waiting += [*item.arguments, *item.state.values()]
        else:
            allowed = (bool, int, float, complex, str, bytes, bytearray, slice, torch.dtype, torch.layout, torch.device, type(None))
            assert isinstance(item, allowed) or type(item).__name__ == "Name", type(item)


@pytest.mark.parametrize("number", range(len(ATTEMPTS)))
def test_each_attempt_is_refused_or_inert(number: int, workspace: Path) -> None:
    """By itself, at the beginning of a pickle."""
    (workspace / "a.pkl").write_bytes(b"\x80\x04" + ATTEMPTS[number] + b".")
    before = _watched()
    found = guarded(lambda: _allowed(load_pickle(workspace / "a.pkl")), 6000, CheckpointError, "a.pkl")
    assert _watched() == before and (isinstance(found, Refused) or found is None)


test_bytes, test_bytes_long = fuzzed(check_bytes)
test_instructions, test_instructions_long = fuzzed(check_instructions)
