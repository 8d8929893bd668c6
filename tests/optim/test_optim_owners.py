"""Twin of ``hf_zero/core/optimizer/owners.py``, and what ``hf_zero/core/optimizer/owners.py`` moves."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.core.optimizer.owners import TensorMoves, assign_owners, holders, spread_of
from hf_zero.core.units.layout import FROZEN, UnitLayout, build_layout
from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run
from tests.support.whole_tensors import start

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6)


def layouts(units: list[list[list[int]]], world: int, frozen: bool = False) -> list[UnitLayout]:
    made = []
    for number, unit in enumerate(units):
        params = [(f"{number}.{index}", torch.Size(shape)) for index, shape in enumerate(unit)]
        groups = [FROZEN if frozen and index % 3 == 0 else index % 2 for index in range(len(unit))]
        made.append(build_layout(str(number), params, groups, torch.float32, world)[0])
    return made


@given(st.lists(shapes, max_size=4), st.integers(1, 5), st.booleans())
def test_every_trained_parameter_has_one_owner_and_no_rank_more_than_a_share_and_a_parameter(
    units: list[list[list[int]]], world: int, frozen: bool
) -> None:
    for sharded in (1, world):
        made = layouts(units, sharded, frozen)
        owned = assign_owners(spread_of(made, world), world)
        wanted = [slot.name for layout in made for slot in layout.slots if slot.group != FROZEN and slot.numel]
        assert [entry.slot.name for entry in owned] == wanted
        assert owned == assign_owners(spread_of(made, world), world)
        sizes = [entry.slot.numel for entry in owned]
        for rank in range(world):
            load = sum(entry.slot.numel for entry in owned if entry.rank == rank)
            assert load <= sum(sizes) / world + max(sizes, default=0)


@given(shapes, st.integers(1, 5))
def test_holders_cover_a_parameter_once(unit: list[list[int]], world: int) -> None:
    layout = layouts([unit], world)[0]
    for slot in layout.slots:
        parts = [part for part in holders(layout, slot.range, world) if part.numel]
        assert sum(part.numel for part in parts) == slot.numel
        assert all(left.stop == right.start for left, right in zip(parts, parts[1:], strict=False))


def test_equal_blocks_stay_where_they_are() -> None:
    """Four equal parameters on four ranks: each shard holds one, and nothing would travel."""
    made = layouts([[[4, 4]] * 4] * 3, 4)

    for entry in assign_owners(spread_of(made, 4), 4):
        assert entry.spread.pieces[entry.rank].inside.numel == 16


def _there_and_back(stage: int) -> tuple[int, int]:
    """What is collected is whole; what is scattered is what was collected; returns bytes sent and elements of the shards."""
    engine = start("RowScaled", CASES["odd_mlp"], Run(stage=stage))
    net = engine.collectives
    owned = assign_owners(spread_of([unit.layout for unit in engine.optimizer.units], net.world), net.world)
    sent, numel = net.sent_bytes, 0
    for index, unit in enumerate(engine.optimizer.units):
        moves = TensorMoves(unit, [entry for entry in owned if entry.unit == index], net)
        numbers = torch.arange(unit.layout.padded_numel, dtype=torch.float32)
        flat = numbers[unit.owned.start : unit.owned.stop].clone()
        tensors, pending = moves.collect(flat, "test")
        pending.wait()
        for slot in (entry.slot for entry in moves.own):
            assert torch.equal(tensors[slot.name], numbers[slot.range.start : slot.range.stop].view(slot.shape))
        target = -torch.ones_like(flat)
        moves.scatter({name: tensor + 0.5 for name, tensor in tensors.items()}, target, "test").wait()
        expected = -torch.ones_like(numbers)
        for slot in unit.layout.slots:
            expected[slot.range.start : slot.range.stop] = numbers[slot.range.start : slot.range.stop] + 0.5
        assert torch.equal(target, expected[unit.owned.start : unit.owned.stop])
        assert torch.equal(flat, numbers[unit.owned.start : unit.owned.stop]), "collecting changes nothing"
        numel += flat.numel()
    sent = net.sent_bytes - sent
    engine.destroy()
    return sent, numel


def test_parameters_travel_to_their_owners_and_back() -> None:
    for world in (1, 2, 3):
        found = ranks.run_ranks(_there_and_back, world, 1)
        sent, numel = (sum(values) for values in zip(*found, strict=True))
        assert sent < 2 * 4 * numel if world > 1 else sent == 0
    for sent, _ in ranks.run_ranks(_there_and_back, 2, 0):
        assert sent == 0
