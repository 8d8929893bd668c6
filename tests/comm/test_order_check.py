"""The check of recorded collectives: sequences that are fine, that differ, that wait for each other; and what ranks write down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.collective_order import Issue, OrderError, Record, check, replay

GATHERS, REDUCTIONS, USERS = "gathers", "reductions", "users"
PAIR = dict.fromkeys((GATHERS, REDUCTIONS, USERS), (0, 1))


def gather(unit: str) -> Issue:
    return Issue(GATHERS, "all_gather", unit, 64)


def reduction(unit: str) -> Issue:
    return Issue(REDUCTIONS, "reduce_scatter", unit, 64)


def reduce_by_user() -> Issue:
    return Issue(USERS, "all_reduce", "", 4)


def of(*events: Issue | int, groups: dict[str, tuple[int, ...]] = PAIR) -> Record:
    """A record of collectives and of numbers of those waited for, in the order of the program."""
    record = Record(dict(groups))
    for event in events:
        if isinstance(event, Issue):
            record.issues.append(event)
        else:
            record.waits.append((len(record.issues), event))
    return record


def refused(*records: Record) -> str:
    with pytest.raises(OrderError) as caught:
        check(records)
    return str(caught.value)


# -- hand-written sequences -----------------------------------------------------------------------------------------------


def test_the_same_sequences_are_fine_wherever_ranks_wait() -> None:
    first = of(gather("a"), reduction("b"), 0, gather("c"), 1, 2)
    other = of(gather("a"), 0, reduction("b"), 1, gather("c"))
    check([first, other])


def test_another_order_within_a_group_is_shown() -> None:
    text = refused(of(gather("a"), gather("b"), gather("c")), of(gather("a"), gather("c"), gather("b")))
    assert "group gathers carries different sequences" in text
    assert text.splitlines()[1:] == [
        "after 1 that are the same, the last of them",
        "  all_gather (a) 64 bytes on group gathers",
        "rank 0 goes on, to 3 in all, with",
        "  all_gather (b) 64 bytes on group gathers",
        "  all_gather (c) 64 bytes on group gathers",
        "rank 1 goes on, to 3 in all, with",
        "  all_gather (c) 64 bytes on group gathers",
        "  all_gather (b) 64 bytes on group gathers",
    ]


@pytest.mark.parametrize(
    "other",
    [Issue(GATHERS, "all_gather", "a", 32), Issue(GATHERS, "broadcast", "a", 64), Issue(GATHERS, "all_gather", "b", 64)],
)
def test_bytes_operation_and_label_count(other: Issue) -> None:
    assert "different sequences" in refused(of(gather("a")), of(other))


def test_what_one_rank_leaves_out_is_shown() -> None:
    assert "nothing more" in refused(of(gather("a"), gather("b")), of(gather("a")))
    assert "nothing more" in refused(of(gather("a")), Record())


def test_two_groups_in_different_orders_are_shown_even_where_nobody_waits() -> None:
    text = refused(of(gather("a"), reduction("b")), of(reduction("b"), gather("a")))
    assert "several groups are issued in different orders" in text


def test_a_users_collective_between_gathers_is_shown() -> None:
    text = refused(of(gather("a"), reduce_by_user(), gather("b")), of(gather("a"), gather("b"), reduce_by_user()))
    assert "all_reduce 4 bytes on group users" in text


def test_ranks_that_wait_for_each_other_across_two_groups() -> None:
    """A rank that computes a tower waits for RS(v24) before it gathers v19; one without an image reduces behind all its gathers."""
    computes = of(gather("v20"), reduction("v24"), reduction("v23"), 1, gather("v19"))
    skips = of(gather("v20"), gather("v19"), 1, reduction("v24"), reduction("v23"))
    assert replay([computes, skips], PAIR) == [
        "rank 0 waits for reduce_scatter (v24) 64 bytes on group reductions, which rank(s) [1] have not issued; "
        "the last it issued is reduce_scatter (v23) 64 bytes on group reductions",
        "rank 1 waits for all_gather (v19) 64 bytes on group gathers, which rank(s) [0] have not issued; "
        "the last it issued is all_gather (v19) 64 bytes on group gathers",
    ]


def test_other_orders_end_if_nobody_waits_in_between() -> None:
    assert replay([of(gather("a"), reduction("b"), 0, 1), of(reduction("b"), gather("a"), 0, 1)], PAIR) == []


def test_a_circle_of_pairs_is_found_by_replay_alone() -> None:
    """Each two ranks agree on all they do together, and still each waits for the next."""
    groups = {"01": (0, 1), "12": (1, 2), "02": (0, 2)}
    pair = {name: Issue(name, "all_reduce", name) for name in groups}
    records = [
        of(pair["01"], 0, pair["02"], groups=groups),
        of(pair["12"], 0, pair["01"], groups=groups),
        of(pair["02"], 0, pair["12"], groups=groups),
    ]
    text = refused(*records)
    assert "wait for each other" in text
    assert [line.split(",")[0] for line in text.splitlines()[1:]] == [
        "rank 0 waits for all_reduce (01) on group 01",
        "rank 1 waits for all_reduce (12) on group 12",
        "rank 2 waits for all_reduce (02) on group 02",
    ]


def test_pairs_of_ranks_may_do_different_things() -> None:
    groups = {"01": (0, 1), "23": (2, 3), "all": (0, 1, 2, 3)}
    left, right, whole = Issue("01", "all_gather", "x"), Issue("23", "all_to_all", "y"), Issue("all", "all_reduce")
    lower, upper = of(left, 0, left, 1, whole, 2, groups=groups), of(right, 0, whole, 1, groups=groups)
    check([lower, lower, upper, upper])


# -- what ranks write down ------------------------------------------------------------------------------------------------


def _both_groups(swap_on_one: bool) -> None:
    """Two collectives in flight on groups of their own; gloo carries them in any order."""
    other = dist.new_group([0, 1])
    one, two = torch.ones(4), torch.ones(8)
    works = []
    for tensor, group in [(two, other), (one, None)] if swap_on_one and ranks.rank() == 1 else [(one, None), (two, other)]:
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for work in works:
        work.wait()
    assert one.sum() == 8 and two.sum() == 16
    dist.barrier()  # neither leaves before the other has all it was sent


def test_a_job_whose_groups_are_in_different_orders_fails() -> None:
    ranks.run_ranks(_both_groups, 2, False)
    ranks.run_ranks(_both_groups, 2, True, ordered=False)
    with pytest.raises(OrderError, match=r"different orders(.|\n)*rank 1 goes on, to 3 in all, with\n  all_reduce 32 bytes on group 1"):
        ranks.run_ranks(_both_groups, 2, True)


def _calls_of_users() -> None:
    tensor, pieces = torch.ones(2), [torch.empty(2), torch.empty(2)]
    dist.all_reduce(tensor)
    work = dist.all_gather(pieces, tensor, async_op=True)
    dist.barrier()
    work.wait()
    work.wait()
    if ranks.rank() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    dist.broadcast(tensor, 0)


def test_calls_of_users_and_their_waits_are_written_down() -> None:
    for outcome in ranks.observe_ranks(_calls_of_users, 2):
        group = "0 of ranks 0,1"
        assert outcome.record == of(
            Issue(group, "all_reduce", "", 8), 0, Issue(group, "all_gather"), Issue(group, "barrier"), 2, 1,
            Issue(group, "broadcast", "", 8), 3, groups={group: (0, 1)},
        )  # fmt: skip


def _calls_of_the_package(kind: str) -> None:
    from hf_zero.comm import comms_log
    from hf_zero.comm.back_end import NativeCollectives, RecordedCollectives
    from hf_zero.comm.direct_exchange import GlooCollectives
    from hf_zero.comm.topology import axis_over

    axis = axis_over(dist.new_group([0, 1]))
    chosen: Any = NativeCollectives(axis) if kind == "native" else GlooCollectives(axis)
    if kind == "recorded":
        chosen = RecordedCollectives(chosen, comms_log.CommsLog(comms_log.CommsLogSettings()))
    gathered = chosen.all_gather(torch.empty(4), torch.ones(2), "a")
    reduced = chosen.reduce_scatter(torch.ones(4), torch.float32, unit="b")
    exchanged = chosen.exchange_parts([torch.ones(ranks.rank())] * 2, [torch.ones(1 - ranks.rank())] * 2, "c")
    summed = chosen.all_reduce_in_order(torch.ones(2), "d")
    for pending in (reduced, gathered, summed, exchanged, gathered):
        pending.wait()
    assert chosen.any_rank(ranks.rank() == 1, "e")
    chosen.gather_objects("text", "f")
    chosen.broadcast(torch.ones(2), 0, "g")
    assert reduced.result is not None and reduced.result.tolist() == [2, 2]


@pytest.mark.parametrize("kind", ["gloo", "native", "recorded"])
def test_calls_of_the_package_are_one_event_each(kind: str) -> None:
    group = "1 of ranks 0,1"
    expected = of(
        Issue(group, "all_gather", "a", 16), Issue(group, "reduce_scatter", "b", 16), Issue(group, "exchange_parts", "c"),
        Issue(group, "all_reduce_in_order", "d", 8), 1, 0, 3, 2, Issue(group, "any_rank", "e"), 4, Issue(group, "gather_objects", "f"), 5,
        Issue(group, "broadcast", "g", 8), 6, groups={group: (0, 1)},
    )  # fmt: skip
    for outcome in ranks.observe_ranks(_calls_of_the_package, 2, kind):
        assert outcome.text == "" and outcome.record == expected
