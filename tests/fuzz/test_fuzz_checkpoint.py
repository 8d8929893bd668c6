"""Checkpoints of ours: an index that somebody changed and sealed again, and files with other bytes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hf_zero.checkpoint.convert.native import read_checkpoint
from hf_zero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from hf_zero.errors import CheckpointError
from tests.fuzz.guard import Refused, fuzzed, guarded
from tests.fuzz.mutations import mutate_bytes, mutate_text, mutate_value
from tests.fuzz.summaries import differing, summary
from tests.support.checkpoints import write_index

GOLDEN = Path(__file__).parents[1] / "golden"
OPTIMIZERS = ("adamw", "adafactor")
# What may say anything: it names, or is the caller's; and numbers that a run might have had.
FREE = re.compile(
    r"units/\d+/params/\d+/(shape.*|name)|optimizer/scalars/\d+/values(/step/value)?|counters/.*|scaler(/(scale|good_steps|tolerance))?|scheduler(/last_batch_iteration)?|library|tag|stage|client_state.*|extra_state.*|excluded.*|aliases.*|optimizer/name|units/\d+/dtype"
    r"|optimizer/(groups/\d+/values/(lr|foreach|fused|capturable|weight_decay|initial_lr|beta2_decay|d|eps.*)|params.*)"
)
# Numbers of which another one may be as good.
ANOTHER = re.compile(r"optimizer/groups/\d+/values/betas/items/\d+")
# What a conversion cannot miss, because it does not know the optimizer and the scheduler; ``test_fuzz_load.py`` does.
# A rank whose shard has no parameter with a state lists no file of it.
LOST = re.compile(r"optimizer/(groups/\d+/values|scalars)/.*|scheduler/.*|files/optimizer\.[^/]+")


class Copies(dict[str, tuple[Path, str, dict[str, Any], dict[str, Any], int]]):
    """By optimizer: a folder to change, its index, what is read of it, its weights, its bytes."""

    def __repr__(self) -> str:
        return "copies of checkpoints"


@pytest.fixture(scope="module")
def copies(workspace: Path) -> Copies:
    found = Copies()
    for name in OPTIMIZERS:
        folder = workspace / name
        shutil.copytree(GOLDEN / f"checkpoint_v1_{name}", folder)
        index = (folder / "golden" / "index.json").read_text()
        weights = get_fp32_state_dict_from_zero_checkpoint(folder)
        nbytes = sum(path.stat().st_size for path in (folder / "golden").iterdir())
        found[name] = (folder, index, summary(read_checkpoint(folder / "golden")), weights, nbytes)
    return found


def _read(folder: Path) -> dict[str, Any]:
    return summary(read_checkpoint(folder / "golden"))


def check_index(random: Random, copies: Any) -> None:
    folder, text, expected, _, nbytes = copies[random.choice(OPTIMIZERS)]
    changed, path, how = mutate_value(json.loads(text), random)
    write_index(folder / "golden", json.dumps(changed))
    found = guarded(lambda: _read(folder), nbytes, CheckpointError, "golden")
    if not isinstance(found, Refused):
        place = "/".join(map(str, path))
        free = FREE.fullmatch(place) or (how not in ("number", "kind", "type") and LOST.fullmatch(place))
        free = free or (how == "number" and ANOTHER.fullmatch(place))
        assert free or differing(found, expected) == [], (path, how, differing(found, expected))


def check_index_text(random: Random, copies: Any) -> None:
    folder, text, _, _, nbytes = copies[random.choice(OPTIMIZERS)]
    write_index(folder / "golden", mutate_text(text, random))
    guarded(lambda: _read(folder), nbytes, CheckpointError, "golden")


def check_files(random: Random, copies: Any) -> None:
    folder, text, expected, _, nbytes = copies[random.choice(OPTIMIZERS)]
    (folder / "golden" / "index.json").write_text(text)
    write_index(folder / "golden", text)
    path = random.choice(sorted((folder / "golden").iterdir()))
    before = path.read_bytes()
    try:
        path.write_bytes(mutate_bytes(before, random))
        found = guarded(lambda: _read(folder), nbytes, CheckpointError, "golden")
    finally:
        path.write_bytes(before)
    assert isinstance(found, Refused) or differing(found, expected) == []


def check_script(random: Random, copies: Any) -> None:
    """The stand-alone script gives the weights that were saved, or an error that names a file."""
    folder, text, _, weights, nbytes = copies[random.choice(OPTIMIZERS)]
    changed, path, how = mutate_value(json.loads(text), random)
    write_index(folder / "golden", json.dumps(changed))
    found = guarded(lambda: get_fp32_state_dict_from_zero_checkpoint(folder), nbytes, ValueError, "golden")
    if not isinstance(found, Refused) and not FREE.fullmatch("/".join(map(str, path))):
        assert found.keys() == weights.keys() and all(found[name].equal(weights[name]) for name in weights), (path, how)


test_index, test_index_long = fuzzed(check_index)
test_index_text, test_index_text_long = fuzzed(check_index_text)
test_files, test_files_long = fuzzed(check_files)
test_script, test_script_long = fuzzed(check_script)
