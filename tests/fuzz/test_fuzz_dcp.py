"""Folders of torch.distributed.checkpoint: bytes of any file, instructions of ``.metadata`` and of objects."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from hf_zero.checkpoint.convert.native import read_checkpoint
from hf_zero.checkpoint.convert.torch_dcp import read_dcp, write_dcp
from hf_zero.errors import CheckpointError
from tests.fuzz.guard import Refused, fuzzed, guarded
from tests.fuzz.mutations import mutate_bytes, mutate_pickle
from tests.fuzz.summaries import differing, summary

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_v1_adamw" / "golden"


class Folder:
    """A folder of torch's, one that we wrote, the bytes of their files, and what is read of them."""

    def __init__(self, workspace: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        weights, states = get_state_dict(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": weights, "optim": states}, checkpoint_id=workspace / "torch", no_dist=True)
            write_dcp(read_checkpoint(GOLDEN), workspace / "ours", lambda count: None)
        self.folders = [workspace / "torch", workspace / "ours"]
        self.data = {path: path.read_bytes() for folder in self.folders for path in sorted(folder.iterdir())}
        self.expected = {folder: summary(read_dcp(folder)) for folder in self.folders}

    def nbytes(self, folder: Path) -> int:
        return sum(len(data) for path, data in self.data.items() if path.parent == folder)

    def __repr__(self) -> str:
        return "folders of torch.distributed.checkpoint"


@pytest.fixture(scope="module")
def copies(workspace: Path) -> Folder:
    return Folder(workspace)


def _read_changed(copies: Folder, path: Path, data: bytes) -> Any:
    try:
        path.write_bytes(data)
        return guarded(lambda: summary(read_dcp(path.parent)), copies.nbytes(path.parent), CheckpointError, path.parent.name)
    finally:
        path.write_bytes(copies.data[path])


def check_files(random: Random, copies: Folder) -> None:
    """Items have checksums: what is read is what was written."""
    path = random.choice([path for path in copies.data if path.suffix == ".distcp"])
    found = _read_changed(copies, path, mutate_bytes(copies.data[path], random))
    assert isinstance(found, Refused) or differing(found, copies.expected[path.parent]) == []


def check_metadata(random: Random, copies: Folder) -> None:
    """``.metadata`` has none: names may be others, and what they name be missing; elements and shapes are never others."""
    path = random.choice([path for path in copies.data if path.name == ".metadata"])
    change = random.choice((mutate_bytes, mutate_pickle))
    found = _read_changed(copies, path, change(copies.data[path], random))
    if not isinstance(found, Refused):
        expected = copies.expected[path.parent]
        for name in found.keys() & expected.keys():
            if name.startswith("param"):
                assert found[name] == expected[name], name


def test_metadata_that_runs_code_runs_nothing(copies: Folder, tmp_path: Path) -> None:
    """What selected torch's reader, and was run by it."""

    class Trap:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "sprung"), "w"))

    for folder in copies.folders:
        path = folder / ".metadata"
        found = _read_changed(copies, path, pickle.dumps(Trap()))
        assert isinstance(found, Refused) and "storage_data" in found or "Metadata is expected" in found
    assert not (tmp_path / "sprung").exists()


test_files, test_files_long = fuzzed(check_files)
test_metadata, test_metadata_long = fuzzed(check_metadata)
