"""Tensor files: literal bytes, ranges, damage, hostile headers, and ranges between any two divisions."""

from __future__ import annotations

import os
import re
import zlib
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

from hf_zero.checkpoint.files.catalog import Catalog
from hf_zero.checkpoint.files.rows import Elsewhere, Entry, cut, whole
from hf_zero.checkpoint.files.tensor_reader import Copy, RangeReader
from hf_zero.checkpoint.files.tensor_writer import write_tensor_file
from hf_zero.checkpoint.format.checksum import Checksum, first_damaged
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import CHUNK_BYTES, DTYPES, shard_file
from hf_zero.checkpoint.format.records import (
    FileRecord,
    ParamRecord,
    TensorRecord,
    UnitRecord,
)
from hf_zero.checkpoint.format.tp_shards import SavedTpShard
from hf_zero.core.units.layout import build_layout
from hf_zero.errors import CheckpointError
from tests.checkpoint.checkpoint_index import make_index
from tests.support.versions import needs

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


@needs("safetensors", "0.6", "fewer types")
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
