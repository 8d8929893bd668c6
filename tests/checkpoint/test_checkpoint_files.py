"""Tensor files, the index and the folders: literal bytes, ranges, damage, hostile contents."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from hf_zero.checkpoint.commit import folders, staging
from hf_zero.checkpoint.files.catalog import Catalog
from hf_zero.checkpoint.files.rows import Elsewhere, Entry, cut, whole
from hf_zero.checkpoint.files.tensor_reader import Copy, RangeReader
from hf_zero.checkpoint.files.tensor_writer import write_tensor_file
from hf_zero.checkpoint.format.checksum import Checksum, first_damaged
from hf_zero.checkpoint.format.element_types import DTYPES
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import CHUNK_BYTES, shard_file
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
from hf_zero.checkpoint.format.tp_shards import SavedTpShard
from hf_zero.core.units.layout import build_layout
from hf_zero.errors import CheckpointError
from hf_zero.system import own_files
from hf_zero.system.process import Process
from tests.support.processes import REPO, environment

# -- tensor files -----------------------------------------------------------------------------------------------------------


def test_bytes_of_a_file_are_as_documented(tmp_path: Path) -> None:
    record = write_tensor_file(
        tmp_path / "f", [Entry("u", torch.int16, (5,), (torch.tensor([1, 2], dtype=torch.int16), 2, torch.tensor([-1]).to(torch.int16)))]
    )
    header = b'{"__metadata__":{"format":"pt"},"u":{"dtype":"I16","shape":[5],"data_offsets":[0,10]}}'
    header += b" " * (-len(header) % 8)
    data = b"\x01\x00\x02\x00\x00\x00\x00\x00\xff\xff"
    assert (tmp_path / "f").read_bytes() == len(header).to_bytes(8, "little") + header + data
    prefix = 8 + len(header)
    digits = f"{zlib.crc32((tmp_path / 'f').read_bytes()[:prefix]):08x}"
    expected = FileRecord(prefix + 10, prefix, digits, {"u": TensorRecord("I16", (5,), prefix, 10, f"{zlib.crc32(data):08x}")})
    assert record == expected


@given(cuts=st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=6), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_checksums_do_not_depend_on_how_the_bytes_arrive(cuts: list[int], seed: int) -> None:
    random = Random(seed)
    data = memoryview(random.randbytes(random.choice([3 * CHUNK_BYTES, 3 * CHUNK_BYTES - 5])))
    checksum = Checksum()
    for start, stop in pairwise([0, *sorted(min(place, len(data)) for place in cuts), len(data)]):
        checksum.update(data[start:stop])
    digits = "".join(f"{zlib.crc32(data[start : start + CHUNK_BYTES]):08x}" for start in range(0, len(data), CHUNK_BYTES))
    assert checksum.digits() == digits
    assert first_damaged(data, digits) is None
    position = random.randrange(len(data))
    damaged = bytearray(data)
    damaged[position] ^= 1
    assert first_damaged(memoryview(damaged), digits) == position // CHUNK_BYTES * CHUNK_BYTES


def test_safetensors_reads_every_element_type(tmp_path: Path) -> None:
    tensors = {name: torch.arange(6).to(dtype).reshape(2, 3) for name, dtype in DTYPES.items() if not name.startswith("U") or name == "U8"}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(2.5), "turned": torch.arange(6.0).reshape(2, 3).T}
    record = write_tensor_file(tmp_path / "f", [whole(name, tensor) for name, tensor in tensors.items()])
    back = load_file(tmp_path / "f")
    reader = RangeReader(tmp_path, {"f": record})
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
        assert torch.equal(reader.whole("f", name), tensor), name


def test_ranges_come_back_across_chunks_and_windows(tmp_path: Path) -> None:
    numel = 5 * 2**20 // 4 + 12345  # more than one window of 4 MiB
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    record = write_tensor_file(
        tmp_path / "f", [whole("a", values[:7]), Entry("u", torch.float32, (numel,), (values[:1000], values[1000:]))]
    )
    reader = RangeReader(tmp_path, {"f": record})
    ranges = [(0, 1), (CHUNK_BYTES // 4 - 1, 2), (CHUNK_BYTES // 4, CHUNK_BYTES // 4), (numel - 3, 3), (5, numel - 5), (77, 0)]
    for start, count in ranges:
        target = torch.full((count,), -1.0, dtype=torch.float64)
        reader.read([Copy("f", "u", start, target)])
        assert torch.equal(target, values[start : start + count].double()), (start, count)
    before = reader.bytes_read
    targets = [torch.empty(50) for _ in range(100)]
    reader.read([Copy("f", "u", 100 * index, target) for index, target in enumerate(targets)])  # all in the first chunk
    assert reader.bytes_read - before == CHUNK_BYTES  # the header was verified before
    assert all(torch.equal(target, values[100 * index : 100 * index + 50]) for index, target in enumerate(targets))
    with pytest.raises(CheckpointError, match=f"{numel - 1} to {numel + 1}"):
        reader.read([Copy("f", "u", numel - 1, torch.empty(2))])


@pytest.mark.parametrize("position", [3, 20, 200, -1, -CHUNK_BYTES - 9])
def test_any_flipped_bit_is_found_and_named(tmp_path: Path, position: int) -> None:
    values = torch.arange(3 * CHUNK_BYTES // 4, dtype=torch.int32)
    record = write_tensor_file(tmp_path / "f", [whole("u", values)])
    data = bytearray((tmp_path / "f").read_bytes())
    data[position] ^= 16
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(tmp_path / 'f'))}.* is damaged"):
        RangeReader(tmp_path, {"f": record}).whole("f", "u")


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 8,
        (2**40).to_bytes(8, "little"),
        (0).to_bytes(8, "little"),
        lambda text: text.replace(b"F32", b"F64"),
        lambda text: text.replace(b"[0,400]", b"[4,404]"),
        lambda text: text.replace(b'"u"', b'"v"'),
    ],
)
def test_a_header_is_never_trusted(tmp_path: Path, header: Any) -> None:
    """Whatever the file says of itself, nothing but the index is believed."""
    record = write_tensor_file(tmp_path / "f", [whole("u", torch.zeros(100))])
    data = (tmp_path / "f").read_bytes()
    changed = header + data[8:] if isinstance(header, bytes) else header(data)
    assert changed != data and len(changed) == len(data)
    (tmp_path / "f").write_bytes(changed)
    with pytest.raises(CheckpointError, match="f is damaged: the checksum of its header"):
        RangeReader(tmp_path, {"f": record}).whole("f", "u")


def test_damage_outside_the_range_is_not_read(tmp_path: Path) -> None:
    record = write_tensor_file(tmp_path / "f", [whole("u", torch.zeros(3 * CHUNK_BYTES // 4))])
    data = bytearray((tmp_path / "f").read_bytes())
    data[-1] ^= 1
    (tmp_path / "f").write_bytes(data)
    target = torch.empty(CHUNK_BYTES // 2)
    RangeReader(tmp_path, {"f": record}).read([Copy("f", "u", 0, target)])
    assert not target.any()


def test_truncated_and_missing_files_are_named(tmp_path: Path) -> None:
    record = write_tensor_file(tmp_path / "f", [whole("u", torch.zeros(100))])
    os.truncate(tmp_path / "f", record.nbytes - 1)
    with pytest.raises(CheckpointError, match="f has 503 bytes, the index says 504"):
        RangeReader(tmp_path, {"f": record}).whole("f", "u")
    (tmp_path / "f").unlink()
    with pytest.raises(CheckpointError, match="cannot read .*f"):
        RangeReader(tmp_path, {"f": record}).whole("f", "u")


def test_write_refuses_an_existing_file_and_two_tensors_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="two tensors are named 'u'"):
        write_tensor_file(tmp_path / "f", [whole("u", torch.ones(1)), whole("u", torch.ones(1))])
    write_tensor_file(tmp_path / "f", [])
    with pytest.raises(FileExistsError):
        write_tensor_file(tmp_path / "f", [])
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert list(file.keys()) == []


# -- range arithmetic between layouts ------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[str, torch.Size]], tuple[int, int], tuple[int, int]]:
    """Parameters, data-parallel ranks before and after, tensor-parallel ranks before and after."""
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=6))
    worlds = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return (
        [(f"p{position}", torch.Size(shape)) for position, shape in enumerate(shapes)],
        worlds,
        (
            draw(st.integers(1, 3)),
            draw(st.integers(1, 3)),
        ),
    )


def divide(shape: torch.Size, world: int, random: Any) -> list[SavedTpShard]:
    """A tensor-parallel plan: each index along one dimension belongs to one rank, in runs that are divided one by one (fused q, k, v)."""
    if world == 1 or not shape or random.random() < 0.2:
        return [SavedTpShard(tuple(shape))] * world  # every rank holds it
    dim = random.randrange(len(shape))
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    cuts = sorted(random.randrange(shape[dim] + 1) for _ in range(random.randrange(1, 3) * world - 1))
    for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, shape[dim]], strict=True)):
        ranges[number % world].append((start, stop))
    return [SavedTpShard(tuple(shape), dim, tuple(own)) for own in ranges]


@given(layouts(), st.randoms())
@settings(max_examples=80, deadline=None)
def test_every_element_arrives_from_any_division_to_any_other(tmp_path_factory: pytest.TempPathFactory, case: Any, random: Any) -> None:
    """Numbers every element of every parameter, writes the shards of one layout, reads those of another with another order and division."""
    params, (world_before, world_after), (tensor_before, tensor_after) = case
    folder = tmp_path_factory.mktemp("ranges")
    values, count = {}, 0
    for name, shape in params:
        values[name] = torch.arange(count, count + shape.numel()).view(shape)
        count += shape.numel()
    plan = {name: divide(shape, tensor_before, random) for name, shape in params}
    files, units = {}, []
    groups = [random.randrange(2) for _ in params]
    for tensor_rank in range(tensor_before):
        local = [(name, torch.Size(plan[name][tensor_rank].local_shape)) for name, _ in params]
        before, _ = build_layout("unit", local, groups, torch.int64, world_before)
        flat = torch.full((before.padded_numel,), -1)
        for slot in before.slots:
            flat[slot.range.start : slot.range.stop] = take(values[slot.name], plan[slot.name][tensor_rank]).reshape(-1)
        for rank in range(world_before):
            owned = before.shard_range(rank)
            name = shard_file("master", rank, world_before, tensor_rank, tensor_before)
            files[name] = write_tensor_file(folder / name, [whole("unit", flat[owned.start : owned.stop])])
        records = []
        for slot in before.slots:
            held = plan[slot.name][tensor_rank]
            records.append(ParamRecord(slot.name, held.shape, slot.offset, slot.group, held.dim, held.ranges))
        units.append(UnitRecord("unit", "master", "I64", world_before, before.padded_numel, tensor_rank, tuple(records)))
    index = Index.from_json(
        make_index(units=tuple(units), files=files, world=world_before * tensor_before, tensor_world=tensor_before).to_json(), "i"
    )
    catalog = Catalog(index)
    reader = RangeReader(folder, files)

    shuffled = random.sample(params, len(params))
    plan = {name: divide(shape, tensor_after, random) for name, shape in params}
    for tensor_rank in range(tensor_after):
        local = [(name, torch.Size(plan[name][tensor_rank].local_shape)) for name, _ in shuffled]
        after, _ = build_layout("other", local, [random.randrange(2) for _ in params], torch.int64, world_after)
        whole_again = torch.full((after.padded_numel,), -1)
        for rank in range(world_after):
            owned = after.shard_range(rank)
            shard = torch.full((after.shard_numel,), -1)
            for slot in after.slots:
                part, found = slot.range.intersect(owned), catalog.find(slot.name)
                assert found is not None
                if part.numel:
                    target = shard[part.start - owned.start : part.stop - owned.start]
                    reader.read(catalog.copies(found, None, plan[slot.name][tensor_rank], part.start - slot.offset, target))
            whole_again[owned.start : owned.stop] = shard
        for slot in after.slots:
            expected = take(values[slot.name], plan[slot.name][tensor_rank]).reshape(-1)
            assert torch.equal(whole_again[slot.range.start : slot.range.stop], expected)
        assert (whole_again == -1).sum() == after.padded_numel - sum(slot.numel for slot in after.slots)


def take(value: torch.Tensor, held: SavedTpShard) -> torch.Tensor:
    """What a rank holds of a tensor, the obvious way."""
    if held.dim is None:
        return value
    return torch.cat(
        [value.narrow(held.dim, start, stop - start) for start, stop in held.ranges] or [value.narrow(held.dim, 0, 0)], held.dim
    )


def test_tp_shards_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    record = ParamRecord("w", (4, 2), 0, 0, 0, ((0, 1), (2, 4)))
    files = {shard_file("master", 0, 1): write_tensor_file(tmp_path / "master-00000-of-00001.safetensors", [whole("u", torch.ones(16))])}
    catalog = Catalog(make_index(units=(UnitRecord("u", "master", "F32", 1, 16, 0, (record,)),), files=files))
    found = catalog.find("w")
    assert found is not None
    with pytest.raises(CheckpointError, match="parameter w: no shard in the index holds its elements 2 to 4"):
        list(catalog.copies(found, None, found.whole, 0, torch.empty(8)))


def test_rows_outside_of_memory_are_written_and_read_in_windows(tmp_path: Path) -> None:
    store = torch.randn(3 * 2**20, generator=torch.Generator().manual_seed(0))
    asked = []

    def read(first: int, target: torch.Tensor) -> None:
        asked.append(target.numel())
        target.copy_(store[first : first + target.numel()])

    def write(first: int, source: torch.Tensor) -> None:
        store[first : first + source.numel()] = source

    row = Elsewhere(torch.float32, store.numel(), read, write)
    expected = store.clone()
    files = {"f": write_tensor_file(tmp_path / "f", [Entry("u", torch.float32, (store.numel() - 5,), (3, row[8:]))])}
    assert max(asked) <= 2**20
    back = RangeReader(tmp_path, files).whole("f", "u")
    assert not back[:3].any() and torch.equal(back[3:], expected[8:])
    store.zero_()
    RangeReader(tmp_path, files).read([Copy("f", "u", 3, row[8:])])
    assert torch.equal(store[8:], expected[8:]) and not store[:8].any()


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=6), st.integers(0, 30), st.integers(0, 30))
def test_cut_gives_the_elements_of_a_range(pieces: list[tuple[int, bool]], start: int, length: int) -> None:
    rows: list[Any] = [count if zeros else torch.arange(1, count + 1) for count, zeros in pieces]
    flat = _joined([*rows, 70])
    assert torch.equal(_joined(list(cut(rows, start, start + length))), flat[start : start + length])


def _joined(rows: list[Any]) -> torch.Tensor:
    whole_rows = [torch.zeros(row, dtype=torch.int64) if isinstance(row, int) else row for row in rows]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *whole_rows])


# -- index ------------------------------------------------------------------------------------------------------------------


def make_index(**changes: Any) -> Index:
    empty = Index("0", "t", 1, 1, 0, CHUNK_BYTES, (), (), {}, {}, {}, (), None, None, {}, {}, {}, {})
    return replace(empty, **changes)


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
    (("units", 0, "world"), 3, "cannot be cut into 3"),
    (("units", 0, "world"), 0, "cannot be cut into 0"),
    (("units", 0, "world"), 128, "128 shards, but 2 data-parallel ranks"),
    (("units", 0, "padded_numel"), 10**12, "nothing lies between element 92 and its end at 1000000000000"),
    (("units", 0, "kind"), "../x", "kind is '../x'"),
    (("units", 0, "kind"), "weights", "lacks weights-00000-of-00002.safetensors"),
    (("units", 0, "dtype"), "F33", "dtype is 'F33'"),
    (("units", 0, "padded_numel"), True, "padded_numel is True, expected int"),
    (("units", 0, "padded_numel"), 124, "is no shard of a unit"),
    ((*PARAM, "offset"), -1, "parameter w lies outside"),
    ((*PARAM, "offset"), 97, "parameter w lies outside"),
    ((*PARAM, "shape"), [4, 4], "nothing lies between element 16 and parameter v at 32"),
    (("units", 0, "params", 1, "shape"), [20], "nothing lies between element 52 and its end at 128"),
    (("units", 0, "params", 1, "offset"), 16, "the parameters w and v overlap"),
    ((*PARAM, "name"), "v", "parameter v is there twice"),
    ((*PARAM, "name"), "b", "parameter b is there twice"),
    ((*PARAM, "group"), 1, "parameter w is in param group 0, and in 1"),
    ((*PARAM, "shape"), [-1, -32], "parameter w has shape [-1, -32]"),
    ((*PARAM, "dim"), 2, "dim 2 of shape [4, 8] does not exist"),
    ((*PARAM, "ranges"), [[0, 1]], "has ranges ((0, 1),) and no dim"),
    (("units", 0, "tensor_rank"), 1, "tensor rank 1 of 1 does not exist"),
    (("loose", 0, "dim"), 0, "has another shape in"),
    (("loose", 0, "file"), FILE, "which has no such tensor"),
    (("loose",), [], "holds 'b', which the index lists neither"),
    (("buffers", "b"), "module-00000-of-00002.safetensors", "or it is a parameter too"),
    (("buffers", "c"), "module-00000-of-00002.safetensors", "buffer c"),
    (("aliases", "twin"), "gone", "alias 'twin' of 'gone'"),
    (("aliases", "v"), "w", "alias 'v' of 'w'"),
    (("excluded",), ["w"], "parameter w is there, and listed as excluded"),
    (("world",), -1, "-1 ranks"),
    (("world",), 10**12, "is no file of a checkpoint of 1000000000000 ranks"),
    (("tensor_world",), 3, "a number that divides the ranks"),
    (("stage",), 4, "stage is 4"),
    ((*TENSOR, "offset"), 0, "lie outside a file of 356"),
    ((*TENSOR, "offset"), 101, "lie outside a file of 356"),
    ((*TENSOR, "offset"), 96, "begins at byte 96, what lies before it ends at 100"),
    ((*TENSOR, "nbytes"), 252, "252 bytes do not fit shape"),
    ((*TENSOR, "shape"), [8, 8], "is no shard of a unit"),
    ((*TENSOR, "dtype"), "O8", "'O8' is unknown"),
    ((*TENSOR, "dtype"), "I32", "its shards have the types ['F32', 'I32']"),
    ((*TENSOR, "crc32"), "", "0 digits of checksums"),
    ((*TENSOR, "crc32"), "x" * 8, "digits of checksums"),
    (("files", FILE, "header_nbytes"), 2**33, "a header of 8589934592 bytes does not fit a file of 356"),
    (("files", FILE, "header_crc32"), "boom", "header_crc32 is 'boom'"),
    (("files", FILE, "nbytes"), 400, "its tensors end at byte 356, the file at 400"),
    (("files", FILE), ..., f"lacks {FILE}"),
    (("chunk_bytes",), 1, "chunk_bytes is 1"),
    (("chunk_bytes",), -1, "chunk_bytes is -1"),
    (
        ("files", "../../etc/passwd"),
        {"nbytes": 8, "header_nbytes": 8, "header_crc32": "00000000", "tensors": {}},
        "is no file of a checkpoint",
    ),
    (("optimizer", "states"), ["exp_avg", "exp_avg"], "has a name twice"),
    (("optimizer", "states"), [], "optimizer.exp_avg-00000-of-00002.safetensors' is no file"),
    (("optimizer", "states"), ["exp_avg", "more"], "no file holds the optimizer state 'more'"),
    (("optimizer", "scalars", 0, "unit"), "gone", "of unit 'gone' is unknown"),
    (("optimizer", "scalars", 0, "values"), {"step": -5}, "step is -5"),
    (("optimizer", "scalars", 0, "values"), {"step": 2.5}, "step is 2.5"),
    (("optimizer", "scalars", 0, "values"), {"mu": "x"}, "mu is 'x', expected a finite number"),
    (("optimizer", "groups", 0, "params"), ["w", "v"], "parameter 'v' is in param groups 0 and 1"),
    ((*GROUP, "lr"), "boom", "groups[0]: lr is 'boom', expected a number"),
    ((*GROUP, "lr"), -0.1, "lr is -0.1, expected a number from 0"),
    ((*GROUP, "lr"), {"$": "float", "value": "nan"}, "lr is nan, which is no number"),
    ((*GROUP, "lr"), True, "lr is True"),
    ((*GROUP, "lr"), 1e300, "lr is 1e+300"),
    ((*GROUP, "lr"), ..., "expected hyper-parameters with an lr"),
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
    (("client_states", "2"), {}, "client_states: '2' is no rank of 2"),
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


# -- folders ----------------------------------------------------------------------------------------------------------------


def _finalized(save_dir: Path, tag: str, text: str = "{}") -> Path:
    part = staging.begin(save_dir, tag)
    staging.finalize(part, text)
    return staging.publish(part, save_dir, tag)


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "/abs", ".hidden", "latest", "zero_to_fp32.py", "a\0b"])
def test_tags_that_name_no_folder_are_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match="cannot name a folder"):
        folders.check_tag(tag)


def test_incomplete_folder_is_named_with_the_newest_complete_one(tmp_path: Path) -> None:
    for tag in ("global_step1", "global_step2", "global_step10"):
        _finalized(tmp_path, tag)
    (tmp_path / "global_step10" / "complete").unlink()
    staging.begin(tmp_path, "global_step3")  # killed while it was written
    for tag, problem in (
        ("global_step10", "is incomplete"),
        ("global_step3", "there is no checkpoint folder"),
        ("global_step7", "no checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=f"{problem}.*newest complete one is 'global_step2'"):
            folders.find(tmp_path, tag)
    with pytest.raises(CheckpointError, match="no other is complete"):
        folders.find(tmp_path / "absent", "t")


def test_newest_is_by_number_else_by_time(tmp_path: Path) -> None:
    for number, tag in enumerate(("global_step10", "global_step9")):
        os.utime(_finalized(tmp_path, tag) / "complete", ns=(number, number))
    assert folders.newest_complete(tmp_path) == tmp_path / "global_step10"
    os.utime(_finalized(tmp_path, "best") / "complete", ns=(5, 5))
    assert folders.newest_complete(tmp_path) == tmp_path / "best"


def test_latest_that_names_nothing_complete_gives_way_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert folders.find_latest(tmp_path) is None and folders.find_latest(tmp_path / "absent") is None
    staging.begin(tmp_path, "global_step1")  # killed: nothing was ever saved
    assert folders.find_latest(tmp_path) is None
    own_files.write_text(tmp_path / "latest", "global_step4")
    with pytest.raises(CheckpointError, match="no checkpoint folder .*global_step4; no other is complete there"):
        folders.find_latest(tmp_path)
    (tmp_path / "latest").unlink()
    _finalized(tmp_path, "global_step1")  # killed before ``latest``
    with caplog.at_level("WARNING", "hf_zero"), _propagating():
        assert folders.find_latest(tmp_path) == tmp_path / "global_step1"
        own_files.write_text(tmp_path / "latest", "global_step4")
        assert folders.find_latest(tmp_path) == tmp_path / "global_step1"
    assert "no file 'latest'" in caplog.text and "'latest' names 'global_step4': there is no checkpoint folder" in caplog.text
    own_files.write_text(tmp_path / "latest", "global_step1")
    assert folders.find_latest(tmp_path) == tmp_path / "global_step1"


@contextmanager
def _propagating() -> Iterator[None]:
    """The package's logger keeps its records to itself; pytest listens at the root."""
    from hf_zero.observe import logger

    before, logger.propagate = logger.propagate, True
    try:
        yield
    finally:
        logger.propagate = before


def test_folders_of_killed_saves_are_removed_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    for tag, writer in {
        "mine": Process.own(),
        "dead": replace(Process.own(), pid=dead.pid),
        "far": Process("x", 1),
    }.items():
        (staging.begin(tmp_path, tag) / "writer.json").write_text(json.dumps(writer.as_json()))
    old = staging.begin(tmp_path, "old") / "writer.json"
    old.write_text("{}")
    for path in (old, old.parent):
        os.utime(path, (0, 0))
    staging.begin(tmp_path, "next")
    assert sorted(str(folders.tag_of_staging(path.name)) for path in tmp_path.iterdir()) == ["far", "mine", "next"]


def test_a_file_that_is_renamed_while_one_looks_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a save in the background looks into the folder while others put their notes there."""
    (tmp_path / "stays").write_text("1234")
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([folder / ".rank-00001.json.part", folder / "stays"]))
    assert {name: found.st_size for name, found in own_files.present_files(tmp_path).items()} == {"stays": 4}


def test_the_newest_whole_checkpoint_of_a_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from hf_zero.utils import newest_trainer_checkpoint

    assert newest_trainer_checkpoint(tmp_path / "absent") is None
    for number in (9, 10, 11, 12, 13):
        folder = tmp_path / f"checkpoint-{number}"
        _finalized(folder, f"global_step{number}")
        (folder / "latest").write_text(f"global_step{number}")
        (folder / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-13" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text('{"glo')
    os.rename(tmp_path / "checkpoint-11" / "global_step11", tmp_path / "checkpoint-11" / ".global_step11.part")
    (tmp_path / "checkpoint-11" / "latest").unlink()
    with caplog.at_level("WARNING", "hf_zero"), _propagating():
        assert newest_trainer_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert "checkpoint-13, checkpoint-12, checkpoint-11 in" in caplog.text
    folder = tmp_path / "checkpoint-14"  # two ranks, of which the second was killed before it wrote its random state
    _finalized(folder, "global_step14", json.dumps({"world": 2, "library": "0"}))
    (folder / "latest").write_text("global_step14")
    (folder / "trainer_state.json").write_text("{}")
    torch.save({}, folder / "rng_state_0.pth")
    for half in (b"", b"PK\x03\x04"):
        (folder / "rng_state_1.pth").write_bytes(half)
        assert newest_trainer_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    torch.save({}, folder / "rng_state_1.pth")
    assert newest_trainer_checkpoint(tmp_path) == str(folder)
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text("{}")  # of a run without the engine
    assert newest_trainer_checkpoint(tmp_path) == str(tmp_path / "checkpoint-20")


def test_a_former_checkpoint_is_removed_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    for tag in ("done", "lost"):
        shutil.copytree(_finalized(tmp_path, tag), tmp_path / f".{tag}.former")
    shutil.rmtree(tmp_path / "lost")
    part = staging.begin(tmp_path, "next")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lost.former", part.name, "done"]
    assert folders.find(tmp_path, "lost") == tmp_path / ".lost.former"


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="data exists and is no checkpoint of ours"):
        staging.begin(tmp_path, "data")
    broken = _finalized(tmp_path, "t")
    (broken / "index.json").unlink()
    _finalized(tmp_path, "t")
    assert folders.is_complete(tmp_path / "t")


FOREIGN: dict[str, dict[str, str]] = {
    "a model": {"model.safetensors": "weights"},
    "a model in parts": {"model-00001-of-00002.safetensors": "weights", "index.json": "{}"},
    "an index and a marker of others": {"index.json": "{}", "complete": "yes"},
    "values of others": {"values.safetensors": "x"},
    "a checkpoint and more": {"master-00000-of-00001.safetensors": "x", "notes.txt": "x"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_others_made_stays(tmp_path: Path, name: str) -> None:
    for folder in ("best", ".old.former", ".other.0123abcd.part"):
        (tmp_path / folder).mkdir()
        for file, content in FOREIGN[name].items():
            (tmp_path / folder / file).write_text(content)
            os.utime(tmp_path / folder / file, (0, 0))
        os.utime(tmp_path / folder, (0, 0))
    _finalized(tmp_path, "old")
    with pytest.raises(CheckpointError, match="best exists and is no checkpoint of ours.*choose another tag, or move it away"):
        staging.begin(tmp_path, "best")
    for folder in ("best", ".other.0123abcd.part"):
        assert {path.name: path.read_text() for path in (tmp_path / folder).iterdir()} == FOREIGN[name]
    left = {path.name: path.read_text() for place in ("old", ".old.former") for path in tmp_path.glob(f"{place}/*")}
    assert {**left, "index.json": "", "complete": ""}.keys() >= FOREIGN[name].keys() - {"master-00000-of-00001.safetensors"}


def test_a_link_in_the_place_of_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to(_finalized(tmp_path, "t"))
    with pytest.raises(CheckpointError, match="best is a link; choose another tag"):
        staging.begin(tmp_path, "best")
    assert folders.is_complete(tmp_path / "best")


def test_what_is_in_a_checkpoint_that_is_replaced_moves_to_the_new_one(tmp_path: Path) -> None:
    for number in range(3):
        folder = _finalized(tmp_path, "t", json.dumps({"n": number}))
        if number == 0:
            (folder / "notes.txt").write_text("mine")
            (folder / "plots").mkdir()
            (folder / "plots" / "loss.png").write_text("mine too")
    assert folders.read_index(folder) == '{"n": 2}'
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "plots" / "loss.png").read_text() == "mine too"
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


_SAVING = """
import sys
from pathlib import Path
from hf_zero.checkpoint.commit import staging
part = staging.begin(Path(sys.argv[1]), "t")
(part / "master-00000-of-00001.safetensors").write_text("theirs")
print(part, flush=True)
for step in (lambda: staging.finalize(part, "{}"), lambda: staging.publish(part, Path(sys.argv[1]), "t")):
    sys.stdin.readline()
    step()
"""


def test_a_second_job_that_saves_the_same_tag_is_refused_by_name(tmp_path: Path) -> None:
    """What is complete stays until the first one has its own, and the second works when that is dead."""
    previous = _finalized(tmp_path, "t", '{"n": 1}')
    command = [sys.executable, "-c", _SAVING, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen(command, env=environment(), cwd=REPO, **pipes)
    try:
        part = Path(other.stdout.readline().strip())  # type: ignore[union-attr]
        with pytest.raises(
            CheckpointError, match=rf"process {other.pid} of .*, which runs, is saving checkpoint 't' .*{re.escape(str(part))}"
        ):
            staging.begin(tmp_path, "t")
        assert (part / "master-00000-of-00001.safetensors").read_text() == "theirs"
        assert folders.read_index(previous) == '{"n": 1}'
        _finalized(tmp_path, "another")
        assert part.is_dir()
        writer = Process.of_json(json.loads((part / "writer.json").read_text()))
        assert writer is not None and writer.pid == other.pid
        staging.clear(tmp_path, "t", [writer])  # ranks of one job that share a disk
    finally:
        other.kill()
        other.communicate()
    _finalized(tmp_path, "t", '{"n": 2}')
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "t"]


def test_a_checkpoint_whose_save_was_killed_elsewhere_after_its_rename_is_replaced(tmp_path: Path) -> None:
    for number in range(3):
        folder = _finalized(tmp_path, "t", json.dumps({"n": number}))
        (folder / "writer.json").write_text(json.dumps(Process("elsewhere", 1).as_json()))
    assert [path.name for path in tmp_path.iterdir()] == ["t"] and folders.read_index(tmp_path / "t") == '{"n": 2}'


def test_jobs_that_do_not_know_of_each_other_have_folders_of_their_own(tmp_path: Path) -> None:
    """On two machines, say: each checkpoint is whole, the later one stays."""
    parts = []
    for number in range(2):
        parts.append(staging.begin(tmp_path, "t"))
        writer = json.loads((parts[number] / "writer.json").read_text())
        if number == 0:
            (parts[0] / "writer.json").write_text(json.dumps({**writer, "place": "elsewhere"}))
    for number, part in enumerate(parts):
        (part / "master-00000-of-00001.safetensors").write_text(str(number))
    (parts[0] / "writer.json").write_text(json.dumps(writer))
    for number, part in enumerate(parts):
        staging.finalize(part, json.dumps({"n": number}))
        assert folders.read_index(staging.publish(part, tmp_path, "t")) == json.dumps({"n": number})
        assert (tmp_path / "t" / "master-00000-of-00001.safetensors").read_text() == str(number)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_folder_that_another_process_has_taken_is_not_completed(tmp_path: Path) -> None:
    _finalized(tmp_path, "t", '{"n": 1}')
    part = staging.begin(tmp_path, "t")
    own = (part / "writer.json").read_text()
    other = json.dumps(replace(Process.own(), pid=1).as_json())
    (part / "writer.json").write_text(other)
    with pytest.raises(CheckpointError, match="no longer this process' folder"):
        staging.finalize(part, '{"n": 2}')
    assert not folders.is_complete(part)
    (part / "writer.json").write_text(own)
    staging.finalize(part, '{"n": 2}')
    (part / "writer.json").unlink()
    with pytest.raises(CheckpointError, match="no longer this process' folder"):
        staging.publish(part, tmp_path, "t")
    assert folders.read_index(tmp_path / "t") == '{"n": 1}'


def test_killed_between_the_renames_the_former_checkpoint_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _finalized(tmp_path, "t", '{"n": 1}')
    part = staging.begin(tmp_path, "t")
    staging.finalize(part, '{"n": 2}')
    rename = os.rename

    def killed(source: Path, target: Path) -> None:
        if Path(source) == part:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        staging.publish(part, tmp_path, "t")
    monkeypatch.undo()
    assert folders.read_index(folders.find(tmp_path, "t")) == '{"n": 1}'
    assert folders.read_index(_finalized(tmp_path, "t", '{"n": 3}')) == '{"n": 3}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t"]


def test_index_and_marker_must_agree(tmp_path: Path) -> None:
    folder = _finalized(tmp_path, "t", '{"n": 1}')
    (folder / "index.json").write_text('{"n": 2}')
    with pytest.raises(CheckpointError, match="index.json is damaged"):
        folders.read_index(folder)


def test_latest_that_names_a_path_is_refused(tmp_path: Path) -> None:
    assert folders.read_latest(tmp_path) is None
    own_files.write_text(tmp_path / "latest", "../../elsewhere")
    with pytest.raises(CheckpointError, match="latest: the checkpoint tag '../../elsewhere'"):
        folders.read_latest(tmp_path)
