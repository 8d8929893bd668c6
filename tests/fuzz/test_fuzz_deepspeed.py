"""Folders of DeepSpeed: bytes of their files, instructions of their pickles, and values that somebody changed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hf_zero.checkpoint.convert import deepspeed, native
from hf_zero.checkpoint.convert.torch_files import load_torch_file
from hf_zero.errors import CheckpointError
from tests.fuzz.guard import Refused, fuzzed, guarded
from tests.fuzz.mutations import mutate_bytes, mutate_pickle, mutate_value, repacked
from tests.fuzz.summaries import differing, summary

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = ("deepspeed_stage1_bf16_2", "deepspeed_stage2_fp16_2", "deepspeed_stage3_bf16_2")


class Folders:
    """Folders to change by what they are, what is read of them, and the contents of their files."""

    def __init__(self, workspace: Path) -> None:
        self.folders: list[Path] = []
        for kind in KINDS:
            shutil.copytree(next((GOLDEN / kind).glob("global_step*")), workspace / kind)
            self.folders.append(workspace / kind)
        self.data = {path: path.read_bytes() for folder in self.folders for path in sorted(folder.iterdir())}
        self.values = {path: load_torch_file(path) for path in self.data}
        self.expected = {folder: self.read(folder) for folder in self.folders}

    def read(self, folder: Path) -> dict[str, Any]:
        """What a conversion takes of a folder, which must be a checkpoint that ours can be."""
        source = deepspeed.read_deepspeed(folder, True)
        native.planned_index(source, "t")
        return summary(source)

    def nbytes(self, folder: Path) -> int:
        return sum(len(data) for path, data in self.data.items() if path.parent == folder)

    def changed(self, path: Path, data: bytes) -> Any:
        try:
            path.unlink()  # a mapped file must not change
            path.write_bytes(data)
            return guarded(lambda: self.read(path.parent), self.nbytes(path.parent), CheckpointError, path.parent.name)
        finally:
            path.unlink()
            path.write_bytes(self.data[path])

    def __repr__(self) -> str:
        return "folders of DeepSpeed"


@pytest.fixture(scope="module")
def copies(workspace: Path) -> Folders:
    return Folders(workspace)


def check_bytes(random: Random, copies: Folders) -> None:
    path = random.choice(sorted(copies.data))
    found = copies.changed(path, mutate_bytes(copies.data[path], random))
    assert isinstance(found, Refused) or differing(found, copies.expected[path.parent]) == []


def check_instructions(random: Random, copies: Folders) -> None:
    path = random.choice(sorted(copies.data))
    copies.changed(path, repacked(copies.data[path], lambda inner: mutate_pickle(inner, random)))


# What no reader can know better, or does not read. Files of ranks above 0 repeat most of it.
FREE = re.compile(
    r"ds_config.*|ds_version|(dp|mp)_world_size|global_.*|skipped_steps|lr_scheduler.*|epoch|pair|csr_.*|sparse.*|data_.*|random_ltd"
    r"|optimizer_state_dict/(ds_(config|version).*|dynamic_loss_scale|overflow|clip_grad|.*param_groups/.*|group_paddings.*|zero_stage)"
    r"|.*param_groups/.*|shared_params.*|buffer_names.*|module/frozen.weight|frozen_param_shapes.*"
)


def check_values(random: Random, copies: Folders) -> None:
    path = random.choice(sorted(copies.data))
    changed, place, how = mutate_value(copies.values[path], random)
    values = {**copies.values, path: changed}
    former, deepspeed.load_torch_file = deepspeed.load_torch_file, values.__getitem__
    try:
        found = guarded(lambda: copies.read(path.parent), copies.nbytes(path.parent), CheckpointError, path.parent.name)
    finally:
        deepspeed.load_torch_file = former
    if not isinstance(found, Refused):
        wrong = differing(found, copies.expected[path.parent])
        assert wrong == [] or FREE.fullmatch("/".join(map(str, place))), (path.name, place, how, wrong)


test_bytes, test_bytes_long = fuzzed(check_bytes)
test_instructions, test_instructions_long = fuzzed(check_instructions)
test_values, test_values_long = fuzzed(check_values)
