"""The index of a checkpoint: it comes back, and hostile contents are refused by file and key."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import shard_file
from hf_zero.checkpoint.format.records import (
    FileRecord,
    GroupRecord,
    LooseRecord,
    OptimizerRecord,
    ParamRecord,
    ScalarRecord,
    TensorRecord,
    UnitRecord,
)
from hf_zero.errors import CheckpointError
from tests.checkpoint.checkpoint_index import make_index


def sample_index() -> dict[str, Any]:
    unit = UnitRecord("u", "master", "F32", 2, 128, 0, (ParamRecord("w", (4, 8), 0, 0), ParamRecord("v", (20, 3), 32, 1)))
    shard = FileRecord(356, 100, "00000000", {"u": TensorRecord("F32", (64,), 100, 256, "0" * 8)})
    module = FileRecord(124, 100, "00000000", {"b": TensorRecord("F32", (2, 3), 100, 24, "0" * 8)})
    names = ("master", "optimizer.exp_avg")
    files = {shard_file(kind, rank, 2): shard for kind in names for rank in range(2)} | {shard_file("module", 0, 2): module}
    groups = (GroupRecord(("w",), {"lr": 0.1, "betas": [0.9, 0.99], "amsgrad": False}), GroupRecord(("v",), {"lr": None}))
    optimizer = OptimizerRecord("AdamW", ("exp_avg",), groups, (ScalarRecord("u", 0, {"step": 3.0}),))
    loose = LooseRecord("b", shard_file("module", 0, 2), (2, 3))
    index = make_index(
        world=2, units=(unit,), files=files, optimizer=optimizer, loose=(loose,), aliases={"twin": "w"},
        counters={"global_steps": 3, "skipped_steps": 0, "global_samples": 6},
        scaler={"scale": 2.0, "dynamic": True, "good_steps": 0, "tolerance": 1}, scheduler={"last_epoch": 3, "base_lrs": [0.1]},
    )  # fmt: skip
    data: dict[str, Any] = json.loads(index.to_json())
    return data


def test_index_comes_back() -> None:
    index = make_index(counters={"global_steps": 3, "skipped_steps": 0, "global_samples": 6}, client_state={"a": [1]}, tag="ü")
    assert Index.from_json(index.to_json(), "i") == index
    text = json.dumps(sample_index())
    assert json.loads(Index.from_json(text, "i").to_json()) == json.loads(text)


def _set(path: tuple[Any, ...], value: Any) -> Any:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        if value is ...:
            del data[path[-1]]
        else:
            data[path[-1]] = value

    return change


FILE = "master-00000-of-00002.safetensors"
TENSOR = ("files", FILE, "tensors", "u")
PARAM = ("units", 0, "params", 0)
GROUP = ("optimizer", "groups", 0, "values")
BROKEN = [
    (("version",), 2, "format version 2"),
    (("version",), True, "format version True"),
    (("format",), "other", '"format" must be'),
    (("units",), ..., "key 'units' is missing"),
    (("units",), {}, "units is {}, expected a list"),
    ((*PARAM, "rangs"), [], "key 'rangs' is unknown"),
    ((*PARAM, "dim"), ..., "key 'dim' is missing"),
    (("units", 0, "world"), 3, "cannot be divided into 3"),
    (("units", 0, "world"), 0, "cannot be divided into 0"),
    (("units", 0, "world"), 128, "128 shards, but 2 data-parallel ranks"),
    (("units", 0, "padded_numel"), 10**12, "there is a gap between element 92 and the end of the unit at 1000000000000"),
    (("units", 0, "kind"), "../x", "kind is '../x'"),
    (("units", 0, "kind"), "weights", "lacks weights-00000-of-00002.safetensors"),
    (("units", 0, "dtype"), "F33", "dtype is 'F33'"),
    (("units", 0, "padded_numel"), True, "padded_numel is True, expected int"),
    (("units", 0, "padded_numel"), 124, "is not a shard of a unit"),
    ((*PARAM, "offset"), -1, "parameter w lies outside"),
    ((*PARAM, "offset"), 97, "parameter w lies outside"),
    ((*PARAM, "shape"), [4, 4], "there is a gap between element 16 and parameter v at element 32"),
    (("units", 0, "params", 1, "shape"), [20], "there is a gap between element 52 and the end of the unit at 128"),
    (("units", 0, "params", 1, "offset"), 16, "the parameters w and v overlap"),
    ((*PARAM, "name"), "v", "parameter v occurs twice"),
    ((*PARAM, "name"), "b", "parameter b occurs twice"),
    ((*PARAM, "group"), 1, "parameter w is in param group 0, but its unit says 1"),
    ((*PARAM, "shape"), [-1, -32], "parameter w has shape [-1, -32]"),
    ((*PARAM, "dim"), 2, "dim 2 of shape [4, 8] does not exist"),
    ((*PARAM, "ranges"), [[0, 1]], "has ranges ((0, 1),), but dim is null"),
    (("units", 0, "tensor_rank"), 1, "tensor_rank is 1, allowed are 0 to 0"),
    (("loose", 0, "dim"), 0, "has another shape in"),
    (("loose", 0, "file"), FILE, "which has no such tensor"),
    (("loose",), [], "holds 'b', which the index lists neither"),
    (("buffers", "b"), "module-00000-of-00002.safetensors", "or it is a parameter too"),
    (("buffers", "c"), "module-00000-of-00002.safetensors", "buffer c"),
    (("aliases", "twin"), "gone", "alias 'twin' of 'gone'"),
    (("aliases", "v"), "w", "alias 'v' of 'w'"),
    (("excluded",), ["w"], "parameter w is stored, but listed as excluded"),
    (("world",), -1, "world is -1"),
    (("world",), 10**12, "is not a file name of a checkpoint of 1000000000000 ranks"),
    (("tensor_world",), 3, "tensor_world must divide world"),
    (("stage",), 4, "stage is 4"),
    ((*TENSOR, "offset"), 0, "lie outside a file of 356"),
    ((*TENSOR, "offset"), 101, "lie outside a file of 356"),
    ((*TENSOR, "offset"), 96, "begins at byte 96, but the data before it end at byte 100"),
    ((*TENSOR, "nbytes"), 252, "252 bytes do not fit shape"),
    ((*TENSOR, "shape"), [8, 8], "is not a shard of a unit"),
    ((*TENSOR, "dtype"), "O8", "'O8' is unknown"),
    ((*TENSOR, "dtype"), "I32", "its shards have the types ['F32', 'I32']"),
    ((*TENSOR, "crc32"), "", "0 digits of checksums"),
    ((*TENSOR, "crc32"), "x" * 8, "digits of checksums"),
    (("files", FILE, "header_nbytes"), 2**33, "a header of 8589934592 bytes does not fit a file of 356"),
    (("files", FILE, "header_crc32"), "boom", "header_crc32 is 'boom'"),
    (("files", FILE, "nbytes"), 400, "its tensors end at byte 356, but the file ends at byte 400"),
    (("files", FILE), ..., f"lacks {FILE}"),
    (("chunk_bytes",), 1, "chunk_bytes is 1"),
    (("chunk_bytes",), -1, "chunk_bytes is -1"),
    (
        ("files", "../../etc/passwd"),
        {"nbytes": 8, "header_nbytes": 8, "header_crc32": "00000000", "tensors": {}},
        "is not a file name of a checkpoint",
    ),
    (("optimizer", "states"), ["exp_avg", "exp_avg"], "lists a name twice"),
    (("optimizer", "states"), [], "optimizer.exp_avg-00000-of-00002.safetensors' is not a file name"),
    (("optimizer", "states"), ["exp_avg", "more"], "no file holds the optimizer state 'more'"),
    (("optimizer", "scalars", 0, "unit"), "gone", "of unit 'gone' is unknown"),
    (("optimizer", "scalars", 0, "values"), {"step": -5}, "step is -5"),
    (("optimizer", "scalars", 0, "values"), {"step": 2.5}, "step is 2.5"),
    (("optimizer", "scalars", 0, "values"), {"mu": "x"}, "mu is 'x', expected a finite number"),
    (("optimizer", "groups", 0, "params"), ["w", "v"], "parameter 'v' is in param groups 0 and 1"),
    ((*GROUP, "lr"), "boom", "groups[0]: lr is 'boom', expected a number"),
    ((*GROUP, "lr"), -0.1, "lr is -0.1, expected a number from 0"),
    ((*GROUP, "lr"), {"$": "float", "value": "nan"}, "lr is nan, which is not a number"),
    ((*GROUP, "lr"), True, "lr is True"),
    ((*GROUP, "lr"), 1e300, "lr is 1e+300"),
    ((*GROUP, "betas"), [0.9, -1], "betas is [0.9, -1]"),
    ((*GROUP, "amsgrad"), 2, "amsgrad is 2, expected true or false"),
    (("scheduler", "last_epoch"), "3", "scheduler: last_epoch is '3'"),
    (("scheduler", "base_lrs"), [-0.1], "base_lrs is [-0.1]"),
    (("scaler", "scale"), -1.0, "scale is -1.0"),
    (("scaler", "scale"), 0, "scale is 0"),
    (("scaler", "skale"), 1.0, "scaler has the keys"),
    (("counters", "global_steps"), -1, "'global_steps' is -1"),
    (("counters", "global_stebs"), 1, "'global_stebs' is 1"),
    (("counters", "skipped_steps"), ..., "expected ['global_steps'"),
    (("client_states", "2"), {}, "client_states: '2' is not one of the 2 ranks"),
]


@pytest.mark.parametrize(("path", "value", "message"), BROKEN, ids=lambda part: str(part)[:50])
def test_broken_index_is_refused_by_file_and_key(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = sample_index()
    _set(path, value)(data)
    with pytest.raises(CheckpointError, match=rf"^dir/index\.json.*{re.escape(message)}"):
        Index.from_json(json.dumps(data), "dir/index.json")


def test_keys_that_come_twice_and_numbers_that_are_none_are_refused() -> None:
    text = json.dumps(sample_index())
    for before, after, message in (
        ('"stage": 0', '"stage": 0, "stage": 1', "the key 'stage' comes twice"),
        ('"lr": 0.1', '"lr": NaN', "NaN is no JSON"),
        ('"lr": 0.1', '"lr": 1e999', "the number 1e999 is too large"),
    ):
        assert before in text
        with pytest.raises(CheckpointError, match=f"dir/index.json.*{message}"):
            Index.from_json(text.replace(before, after), "dir/index.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"format": 1}', "[" * 100_000])
def test_no_index_at_all(text: str) -> None:
    with pytest.raises(CheckpointError, match="dir/index.json"):
        Index.from_json(text, "dir/index.json")
