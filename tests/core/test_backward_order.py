"""Test that gathers and reductions have one order on all ranks, whatever each computes: the real schedule and reducer over fake units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.core.schedule.block import Block, UnshardLimits
from hf_zero.core.schedule.reducer import BackwardOrder, Reducer
from hf_zero.core.schedule.schedule import UnshardSchedule
from hf_zero.core.units.layout import UnitState

pytestmark = pytest.mark.quick


@dataclass(eq=False)
class _Unit:
    name: str
    numel: int
    log: list[str]
    state: UnitState = UnitState.SHARDED
    pinned: bool = False
    pinned_in_graph: bool = False
    reshards: bool = True
    rests: bool = False
    exact: bool = False
    derived: Any = field(default_factory=lambda: SimpleNamespace(kept=False))

    @property
    def layout(self) -> Any:
        return SimpleNamespace(padded_numel=self.numel)

    def start_unshard(self) -> None:
        if self.state is UnitState.SHARDED:
            self.log.append(f"gather {self.name}")
            self.state = UnitState.UNSHARDING

    def unshard(self) -> None:
        self.start_unshard()
        self.state = UnitState.UNSHARDED

    def reshard(self, leave: bool = False, for_autograd: bool = False) -> bool:
        if not self.pinned:
            self.state = UnitState.SHARDED
        return not self.pinned

    def show_placeholders(self) -> None: ...


@dataclass(eq=False)
class _Gradients:
    unit: _Unit
    complete: bool = False
    has_local: bool = False
    passed: bool = False
    was_late: bool = False
    late: bool = False
    left: bool = False  # a sum that goes to the replicas next
    shard: Any = None  # no reduced gradients to show
    exchange: Any = field(default_factory=lambda: SimpleNamespace(policy=SimpleNamespace(sharded=False)))
    pool: Any = field(default_factory=lambda: SimpleNamespace(clear=lambda: None))

    @property
    def collected(self) -> _Gradients:
        return self

    @property
    def done(self) -> bool:
        return not self.was_late and (self.complete or self.passed)

    def arrive(self) -> None:
        self.complete = True
        self.has_local = True

    def start_reduce(self, completes: bool, late: bool = False) -> None:
        self.unit.log.append(f"reduce {self.unit.name}")
        self.has_local, self.left = False, True
        self.late = self.late and not late

    def set_aside(self) -> None:
        self.late, self.has_local = self.late or self.has_local, False

    def finish_hop(self) -> None: ...

    def start_hop(self) -> bool:
        sent, self.left = self.left, False
        if sent:
            self.unit.log.append(f"cross {self.unit.name}")
        return sent

    def begin_backward(self) -> None:
        self.complete = self.passed = False


@dataclass(frozen=True)
class _Model:
    sizes: list[int]
    pinned: list[bool]
    limits: UnshardLimits


_MODELS = st.integers(1, 9).flatmap(
    lambda count: st.builds(
        _Model,
        st.lists(st.integers(1, 4), min_size=count, max_size=count),
        st.lists(st.sampled_from([False, False, True]), min_size=count, max_size=count),
        st.builds(UnshardLimits, st.integers(0, 10), st.integers(1, 40), st.just(0)),
    )
)


def _backward(model: _Model, ran: list[int], late: list[bool] | None) -> tuple[list[str], list[bool]]:
    """Return the collectives that a rank issues in one backward in which blocks ``ran`` complete one after the other, and its late
    units.
    """
    log: list[str] = []
    units = [_Unit(f"b{index}", size, log) for index, size in enumerate(model.sizes)]
    blocks: Any = [Block(unit.name, None, [unit]) for unit in units]  # type: ignore[arg-type, list-item]
    for unit, pinned in zip(units, model.pinned, strict=True):
        unit.pinned = pinned
        unit.state = UnitState.UNSHARDED if pinned else UnitState.SHARDED
    root = Block("root", None, [_Unit("root", 1, log, UnitState.UNSHARDED)])  # type: ignore[arg-type, list-item]
    entries = {unit.name: _Gradients(unit) for unit in (*root.units, *units)}  # type: ignore[type-var]
    flags: list[bool] = []

    def ask(own: list[bool]) -> Callable[[], list[bool]]:
        flags.extend(own)
        return lambda: own if late is None else late

    for block in (root, *blocks):
        block.gradients = [entries[block.name]]
    schedule = UnshardSchedule(root, blocks, model.limits, SimpleNamespace())  # type: ignore[arg-type]
    exchange: Any = SimpleNamespace(reduces=True)
    reducer = Reducer(list(entries.values()), exchange, True, ask, lambda text: [text])  # type: ignore[arg-type]
    reducer.begin(reduces=True)
    for index in ran:
        blocks[index].watched(recomputes=False)
    schedule.begin_backward(reducer)
    for index in ran:
        block = blocks[index]
        block.backward_began()
        passed = schedule.backward(block)
        assert block.unsharded
        reducer.close([entry for other in passed for entry in other.gradients])
        entries[block.name].arrive()
        reducer.proceed()
    entries["root"].arrive()
    schedule.end_backward()
    reducer.flush()
    assert not any(entry.has_local or entry.late for entry in entries.values()), "what comes late is reduced in the same backward"
    return log, flags


@given(_MODELS, st.data())
def test_ranks_that_run_other_blocks_issue_the_same_sequence(model: _Model, data: st.DataObject) -> None:
    everything = list(range(len(model.sizes)))[::-1]
    ranks = [
        everything,
        data.draw(st.permutations(everything), "another order"),
        [index for index in everything if data.draw(st.booleans(), "runs")],
        [],
    ]
    told = [_backward(model, ran, None)[1] for ran in ranks]
    late = [any(flags) for flags in zip(*told, strict=True)]
    logs = [_backward(model, ran, late)[0] for ran in ranks]
    assert logs[1:] == logs[:1] * 3
    for hop in ("reduce", "cross"):  # the two hops of a reduction where shards have replicas
        assert sum(line.startswith(hop) for line in logs[0]) == len(model.sizes) + 1 + sum(late)


@given(_MODELS)
def test_nothing_is_late_where_backward_goes_against_forward(model: _Model) -> None:
    ran = list(range(len(model.sizes)))[::-1]
    log, flags = _backward(model, ran, None)
    assert not any(flags)
    free = [f"reduce b{index}" for index in ran] + ["reduce root"]
    assert [line for line in log if line.startswith("reduce")] == free


def test_a_gather_comes_behind_what_is_passed_when_it_is_first_in_reach() -> None:
    order = BackwardOrder([4, 4, 0, 4, 4], [0, 1, 2, 3, 4, 5], reach=8)
    # Position 3 is in reach while the block at 0 is in use; position 4 from position 1 on, when the block at 0 is passed.
    assert [order.before(position) for position in (0, 1, 3, 4)] == [0, 0, 0, 1]
    assert [order.allows(index) for index in range(6)] == [False] * 6
    order.issued = 4
    assert [order.allows(index) for index in range(6)] == [True] + [False] * 5
    order.issued = 5
    assert all(order.allows(index) for index in range(6))


def test_without_prefetching_all_that_is_passed_goes_first() -> None:
    order = BackwardOrder([4, 4, 4], [0, 1, 2], reach=0)
    assert [order.before(position) for position in range(3)] == [0, 1, 2]


# -- forward


def _forward(sizes: list[int], limits: UnshardLimits, ran: list[int]) -> tuple[list[str], list[bool]]:
    """Return the collectives that a rank issues in a training forward of the blocks ``ran``, and the blocks that stay unsharded."""
    log: list[str] = []
    blocks: Any = [Block(f"b{index}", None, [_Unit(f"b{index}", size, log)]) for index, size in enumerate(sizes)]  # type: ignore
    root = Block("root", None, [_Unit("root", 1, log, UnitState.UNSHARDED)])  # type: ignore[arg-type, list-item]
    collectives = SimpleNamespace(any_of=lambda flags, what: flags, broadcast_object=lambda value, source, what: list(value))
    schedule = UnshardSchedule(root, blocks, limits, collectives)  # type: ignore[arg-type]
    schedule.begin_forward(training=True)
    root.entered(recomputed_later=False)
    for index in ran:
        schedule.forward(blocks[index])
        schedule.after_forward(blocks[index])
    schedule.end_forward()
    return log, [block.unsharded for block in blocks]


@pytest.mark.parametrize("reuse", [0, 100])
@pytest.mark.parametrize("ran", [[0, 1, 2, 3], [0, 3], [1], []])
def test_a_forward_joins_the_blocks_that_this_rank_skips(ran: list[int], reuse: int) -> None:
    log, _ = _forward([4, 3, 2, 1], UnshardLimits(0, 100, reuse), ran)
    assert log == ["gather b0", "gather b1", "gather b2", "gather b3"]


@pytest.mark.parametrize(("distance", "kept"), [(0, 0), (1, 1), (3, 1), (4, 2), (8, 2), (9, 3), (15, 3), (16, 4)])
def test_blocks_stay_unsharded_up_to_the_reuse_distance(distance: int, kept: int) -> None:
    """Check the distance: between a block's forward and its backward, all later blocks are used twice, and the block itself once."""
    _, unsharded = _forward([4, 3, 2, 1], UnshardLimits(0, 100, distance), [0, 1, 2, 3])
    assert unsharded == [False] * (4 - kept) + [True] * kept


def test_prefetching_ends_where_too_much_would_be_live() -> None:
    log: list[str] = []
    blocks: Any = [Block(f"b{index}", None, [_Unit(f"b{index}", size, log)]) for index, size in enumerate([4, 3, 2])]  # type: ignore
    root = Block("root", None, [_Unit("root", 1, log, UnitState.UNSHARDED)])  # type: ignore[arg-type, list-item]
    UnshardSchedule(root, blocks, UnshardLimits(100, 8, 0), SimpleNamespace()).begin_forward(training=True)  # type: ignore[arg-type]
    assert log == ["gather b0", "gather b1"], "1 + 4 + 3 elements"


def test_a_block_whose_module_still_runs_stays_unsharded() -> None:
    blocks: Any = [Block("b0", None, [_Unit("b0", 4, [])])]  # type: ignore[arg-type, list-item]
    root = Block("root", None, [_Unit("root", 1, [], UnitState.UNSHARDED)])  # type: ignore[arg-type, list-item]
    schedule = UnshardSchedule(root, blocks, UnshardLimits(0, 100, 0), SimpleNamespace())  # type: ignore[arg-type]
    schedule.begin_forward(training=True)
    root.entered(recomputed_later=False)
    for _ in range(2):  # its forward calls itself
        blocks[0].entered(recomputed_later=False)
        schedule.forward(blocks[0])
    blocks[0].left()
    schedule.after_forward(blocks[0])
    assert blocks[0].unsharded
    blocks[0].left()
    schedule.after_forward(blocks[0])
    assert not blocks[0].unsharded


def test_one_reduction_is_under_way_at_most() -> None:
    log: list[str] = []
    entries: Any = [_Gradients(_Unit(f"b{index}", 1, log)) for index in range(4)]
    for entry in entries:
        entry.finish_hop = lambda entry=entry: log.append(f"finish {entry.unit.name}")
    reducer = Reducer(entries, SimpleNamespace(reduces=True), True, lambda flags: lambda: flags, lambda text: [text])  # type: ignore[arg-type]
    reducer.begin(reduces=True)
    for entry in reversed(entries):
        entry.arrive()
    reducer.proceed()
    assert log == [
        "reduce b3",
        *("reduce b2", "finish b3", "cross b3"),
        *("reduce b1", "finish b2", "cross b2", "finish b3"),  # b3 has one more hop
        *("reduce b0", "finish b1", "cross b1", "finish b2"),
    ]
