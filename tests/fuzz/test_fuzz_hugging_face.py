"""Models of Hugging Face: headers and bytes of safetensors, the index of several files, pickles of weights."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_zero.checkpoint.convert.hugging_face import read_hugging_face
from hf_zero.errors import CheckpointError
from tests.fuzz.guard import Refused, fuzzed, guarded
from tests.fuzz.mutations import mutate_bytes, mutate_text, mutate_value
from tests.fuzz.summaries import differing, summary

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(7)}


class Models:
    """One folder per form: one file, several files with an index, a pickle."""

    def __init__(self, workspace: Path) -> None:
        self.one, self.several, self.pickle = (workspace / name for name in ("one", "several", "pickle"))
        for folder in (self.one, self.several, self.pickle):
            folder.mkdir()
        save_file(WEIGHTS, self.one / "model.safetensors")
        names = sorted(WEIGHTS)
        files = {name: f"model-0000{number}-of-00003.safetensors" for number, name in enumerate(names, 1)}
        for name, file in files.items():
            save_file({name: WEIGHTS[name]}, self.several / file)
        self.index = {"metadata": {"total_size": 36}, "weight_map": files}
        self.write_index(json.dumps(self.index))
        torch.save(WEIGHTS, self.pickle / "pytorch_model.bin")
        self.data = {path: path.read_bytes() for path in (self.one / "model.safetensors", self.pickle / "pytorch_model.bin")}
        self.expected = self.read(self.one)

    def write_index(self, text: str) -> None:
        (self.several / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def read(self, folder: Path) -> dict[str, Any]:
        return summary(read_hugging_face(folder, True))

    def __repr__(self) -> str:
        return "models of Hugging Face"


@pytest.fixture(scope="module")
def copies(workspace: Path) -> Models:
    return Models(workspace)


def _read_changed(copies: Models, path: Path, data: bytes) -> Any:
    path.unlink()  # a mapped file must not change
    path.write_bytes(data)
    return guarded(lambda: copies.read(path.parent), len(data), CheckpointError, path.parent.name)


def check_safetensors(random: Random, copies: Models) -> None:
    """They have no checksum: any values may come, in any of the shapes and types that fit their bytes."""
    path = copies.one / "model.safetensors"
    data = copies.data[path]
    if random.random() < 0.5:
        _read_changed(copies, path, mutate_bytes(data, random))
        return
    length = int.from_bytes(data[:8], "little")
    changed, _, _ = mutate_value(json.loads(data[8 : 8 + length]), random)
    header = json.dumps(changed).encode()
    found = _read_changed(copies, path, len(header).to_bytes(8, "little") + header + data[8 + length :])
    if not isinstance(found, Refused):
        nbytes = sum(len(entry[2][1]) for name, entry in found.items() if name.startswith("param"))
        assert nbytes == len(data) - 8 - length


def check_pickle(random: Random, copies: Models) -> None:
    path = copies.pickle / "pytorch_model.bin"
    found = _read_changed(copies, path, mutate_bytes(copies.data[path], random))
    assert isinstance(found, Refused) or differing(found, copies.expected) == []


def check_index(random: Random, copies: Models) -> None:
    text = mutate_text(json.dumps(copies.index), random) if random.random() < 0.3 else json.dumps(mutate_value(copies.index, random)[0])
    copies.write_index(text)
    found = guarded(lambda: copies.read(copies.several), 4096, CheckpointError, "several")
    if not isinstance(found, Refused):  # the index may leave out a file, or the tensors of one
        assert all(found[name] == copies.expected[name] for name in found)


test_safetensors, test_safetensors_long = fuzzed(check_safetensors)
test_pickle, test_pickle_long = fuzzed(check_pickle)
test_index, test_index_long = fuzzed(check_index)
