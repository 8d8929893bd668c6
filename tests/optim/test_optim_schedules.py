"""Tests of ``hf_zero/optim/schedules.py``: rates against formulas written out here. Run: ``pytest tests/optim/test_optim_schedules.py``."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from hf_zero.errors import CheckpointError, ConfigError, StateError, UnsupportedError
from hf_zero.optim import schedules
from hf_zero.optim.factory import build_scheduler
from hf_zero.optim.schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

pytestmark = pytest.mark.quick


def adam(*rates: float) -> torch.optim.Adam:
    """Adam with one group per rate."""
    return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates or (1e-3,)])


def sweep(scheduler: LRScheduler, steps: int, group: int = 0) -> list[float]:
    """The rate in ``param_groups`` at construction and after each step."""
    seen = [scheduler.optimizer.param_groups[group]["lr"]]
    for _ in range(steps):
        scheduler.step()
        seen.append(scheduler.optimizer.param_groups[group]["lr"])
    return seen


# --- numbers ---


@pytest.mark.parametrize("steps", [2, 5, 10])
def test_warmup_lr_log(steps: int) -> None:
    scheduler = WarmupLR(adam(), warmup_min_lr=1e-4, warmup_max_lr=1e-2, warmup_num_steps=steps)
    # one value before the first step, then iterations 0 .. 11
    expected = [1e-4] + [1e-4 + (1e-2 - 1e-4) * min(1.0, math.log(i + 1) / math.log(steps)) for i in range(12)]
    assert sweep(scheduler, 12) == pytest.approx(expected, rel=1e-12)


def test_warmup_lr_linear_literal_values() -> None:
    scheduler = WarmupLR(adam(), 0.0, 0.1, warmup_num_steps=4, warmup_type="linear")
    assert sweep(scheduler, 7) == pytest.approx([0.0, 0.0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_warmup_lr_defaults_to_each_groups_own_rate() -> None:
    optimizer = adam(1e-3, 4e-3)
    WarmupLR(optimizer, warmup_num_steps=3).step(10)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 4e-3]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_no_warmup_counts_as_two_steps(steps: int) -> None:
    assert sweep(WarmupLR(adam(), 0.0, 1.0, warmup_num_steps=steps), 3) == [0.0, 0.0, 1.0, 1.0]


def test_per_group_lists() -> None:
    optimizer = adam(1.0, 1.0)
    scheduler = WarmupLR(optimizer, [0.0, 0.2], [1.0, 2.0], warmup_num_steps=4, warmup_type="linear")
    scheduler.step(2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 1.1])
    assert scheduler.get_last_lr() == pytest.approx([0.5, 1.1])


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_decay_lr(kind: str) -> None:
    warmup, total, low, high = 4, 10, 1e-4, 1e-2

    def way(i: int) -> float:
        if i < warmup:
            return math.log(i + 1) / math.log(warmup) if kind == "log" else i / warmup
        return max(0.0, (total - i) / (total - warmup))

    scheduler = WarmupDecayLR(adam(), total, low, high, warmup, kind)
    expected = [low] + [low + (high - low) * way(i) for i in range(14)]
    assert sweep(scheduler, 14) == pytest.approx(expected, rel=1e-12)
    assert expected[1 + total :] == [low] * 4


@pytest.mark.parametrize("total", [3, 5])
def test_decay_shorter_than_the_warmup_drops_after_it(total: int) -> None:
    assert sweep(WarmupDecayLR(adam(), total, 0.0, 1.0, 5, "linear"), 8)[-3:] == [0.0, 0.0, 0.0]
    assert sweep(WarmupCosineLR(adam(1.0), total, 0.0, 5, 0.1), 8)[-3:] == pytest.approx([0.1] * 3)


def test_warmup_cosine_lr() -> None:
    warmup, total, start, end = 4, 10, 0.25, 0.1

    def ratio(i: int) -> float:
        if i < warmup:
            return start + (1 - start) * i / warmup
        along = min(1.0, (i - warmup + 1) / (total - warmup))
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * along))

    for group, peak in enumerate((1e-3, 5e-3)):
        scheduler = WarmupCosineLR(adam(1e-3, 5e-3), total, start, warmup, end, "linear")
        expected = [0.0] + [peak * ratio(i) for i in range(14)]
        assert sweep(scheduler, 14, group) == pytest.approx(expected, rel=1e-12)


def test_one_cycle_rate_momentum_and_decay() -> None:
    optimizer = adam()
    scheduler = OneCycle(
        optimizer,
        0.1,
        1.0,
        decay_lr_rate=0.5,
        cycle_first_step_size=4,
        cycle_second_step_size=2,
        decay_step_size=3,
        cycle_min_mom=0.5,
        cycle_max_mom=0.9,
        decay_mom_rate=0.01,
    )
    heights = [0.0, 0.25, 0.5, 0.75, 1.0, 0.5, 0.0]
    lrs = [0.1 + 0.9 * height for height in heights] + [0.1 / (1 + 0.5 * (n / 3)) for n in range(1, 5)]
    moms = [0.5] + [0.9 - 0.4 * height for height in heights[1:]] + [0.9 * (1 + 0.01 * (n / 3)) for n in range(1, 5)]
    seen_moms = [optimizer.param_groups[0]["betas"]]
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(10):
        scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
        seen_moms.append(optimizer.param_groups[0]["betas"])
    assert seen == pytest.approx(lrs, rel=1e-12)
    assert [pair[0] for pair in seen_moms] == pytest.approx(moms, rel=1e-12)
    assert {pair[1] for pair in seen_moms} == {0.99}


def test_one_cycle_stairs_literal_values() -> None:
    scheduler = OneCycle(adam(), 0.0, 12.0, cycle_first_step_size=6, cycle_first_stair_count=3, cycle_second_step_size=4)
    assert sweep(scheduler, 11) == pytest.approx([0, 0, 4, 4, 8, 8, 12, 8, 4, 0, 0, 0])
    scheduler = OneCycle(adam(), 0.0, 12.0, cycle_first_step_size=3, cycle_second_step_size=4, cycle_second_stair_count=2)
    assert sweep(scheduler, 8) == pytest.approx([0, 4, 8, 12, 6, 6, 0, 0, 0])


def test_one_cycle_without_decay_stays_low_and_leaves_sgd_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(schedules, "warn_once", warnings.append)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, momentum=0.7)
    scheduler = OneCycle(sgd, 0.1, 1.0, decay_lr_rate=0.5, cycle_first_step_size=2)  # decay_step_size 0: no decay
    assert sweep(scheduler, 6) == pytest.approx([0.1, 0.55, 1.0, 0.55, 0.1, 0.1, 0.1])
    assert sgd.param_groups[0]["momentum"] == 0.7
    assert scheduler.get_mom() is None
    assert ["cycle_momentum" in text for text in warnings] == [True]


def test_one_cycle_momentum_off_leaves_betas() -> None:
    optimizer = adam()
    OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2, cycle_momentum=False).step()
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("staircase", [False, True])
def test_lr_range_test(staircase: bool) -> None:
    scheduler = LRRangeTest(adam(), 1e-3, 4, 2.0, staircase)
    interval = [i // 4 if staircase else i / 4 for i in range(13)]
    assert sweep(scheduler, 12) == pytest.approx([1e-3 * (1 + 2.0 * n) for n in interval], rel=1e-12)


# --- protocol ---


ALL: list[tuple[str, dict[str, Any]]] = [
    ("LRRangeTest", {"lr_range_test_step_size": 3}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "decay_step_size": 2}),
    ("WarmupLR", {"warmup_num_steps": 4}),
    ("WarmupDecayLR", {"warmup_num_steps": 4, "total_num_steps": 9}),
    ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 9}),
]


def test_valid_names_are_the_class_names() -> None:
    assert sorted(VALID_LR_SCHEDULES) == sorted(name for name, _ in ALL)
    for name, params in ALL:
        scheduler = build_scheduler(name, params, adam())
        assert type(scheduler).__name__ == name
        assert isinstance(scheduler, LRScheduler)


@pytest.mark.parametrize(("name", "params"), ALL)
def test_last_lr_is_what_is_set_from_the_start(name: str, params: dict[str, Any]) -> None:
    optimizer = adam(1e-3, 2e-3)
    scheduler = build_scheduler(name, params, optimizer)
    for _ in range(6):
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == scheduler.get_lr()
        scheduler.step()


@pytest.mark.parametrize(("name", "params"), ALL)
def test_resuming_continues_rates_and_momentum(name: str, params: dict[str, Any]) -> None:
    whole, resumed = adam(), adam()
    reference = build_scheduler(name, params, whole)
    for _ in range(5):
        reference.step()
    again = build_scheduler(name, params, resumed)
    again.load_state_dict(json.loads(json.dumps(reference.state_dict())))
    by_argument = adam()
    build_scheduler(name, params | {"last_batch_iteration": 4}, by_argument)
    for other in (resumed, by_argument):
        assert other.param_groups[0]["lr"] == whole.param_groups[0]["lr"]
        assert other.param_groups[0]["betas"] == whole.param_groups[0]["betas"]
    assert sweep(again, 5) == sweep(reference, 5)


@pytest.mark.parametrize(("name", "params"), ALL)
def test_step_to_an_iteration_is_the_same_as_stepping_there(name: str, params: dict[str, Any]) -> None:
    walked, jumped = build_scheduler(name, params, adam()), build_scheduler(name, params, adam())
    for _ in range(6):
        walked.step()
    jumped.step(5)
    assert jumped.get_last_lr() == walked.get_last_lr()
    jumped.step(batch_iteration=2)
    assert jumped.last_epoch == jumped.last_batch_iteration == 2


def test_works_on_anything_with_live_groups_and_does_not_touch_step() -> None:
    inner = adam(1e-2)
    inner_step = inner.step
    wrapper = SimpleNamespace(param_groups=inner.param_groups)
    scheduler = build_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_max_lr": 0.5}, wrapper)
    scheduler.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.5
    assert inner.step == inner_step


def test_tensor_rate_is_written_in_place() -> None:
    optimizer = adam()
    rate = torch.tensor(1.0)
    optimizer.param_groups[0]["lr"] = rate
    WarmupLR(optimizer, 0.0, 0.5, 2).step(5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_second_schedule_keeps_the_first_base() -> None:
    optimizer = adam(1e-2)
    WarmupLR(optimizer)  # sets the rate to 0
    assert optimizer.param_groups[0]["lr"] == 0.0
    again = WarmupLR(optimizer, warmup_num_steps=2)
    again.step(5)
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_group_added_later_is_refused() -> None:
    optimizer = adam()
    scheduler = WarmupLR(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(StateError, match="built for 1 parameter groups and the optimizer now has 2"):
        scheduler.step()


def test_foreign_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="WarmupLR has last_batch_iteration None"):
        WarmupLR(adam()).load_state_dict({"last_epoch": 3})


@pytest.mark.parametrize(
    ("name", "params", "key"),
    [
        ("WarmupLR", {"warmup_max_lr": 0.5}, "warmup_max_lr"),
        ("WarmupDecayLR", {"warmup_max_lr": 0.5, "total_num_steps": 2000}, "warmup_max_lr"),
        ("WarmupDecayLR", {"total_num_steps": 2000}, "warmup_max_lr"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5}, "cycle_max_lr"),
    ],
)
def test_one_rate_for_groups_with_rates_of_their_own_warns(
    name: str, params: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(schedules, "warn_once", seen.append)
    build_scheduler(name, params, adam(0.02, 1e-5))
    assert len(seen) == 1
    assert f"scheduler.params.{key} is {params.get(key, 0.001):g}, one rate for all 2 parameter groups" in seen[0]
    assert "(0.02, 1e-05)" in seen[0]

    # A list keeps the difference, and equal rates have none: nothing is lost.
    build_scheduler(name, {**params, key: [0.5, 0.1]}, adam(0.02, 1e-5))
    build_scheduler(name, params, adam(0.02, 0.02))
    assert len(seen) == 1


def test_each_groups_own_rate_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(schedules, "warn_once", seen.append)
    build_scheduler("WarmupLR", {}, adam(0.02, 1e-5))
    build_scheduler("WarmupCosineLR", {"total_num_steps": 2000}, adam(0.02, 1e-5))
    assert seen == []


# --- building ---


def test_text_numbers_and_letter_case() -> None:
    optimizer = adam()
    scheduler = build_scheduler("warmuplr", {"warmup_max_lr": "5e-1", "warmup_num_steps": "4", "warmup_min_lr": 0}, optimizer)
    scheduler.step(9)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_torch_schedules_by_name() -> None:
    scheduler = build_scheduler("CosineAnnealingLR", {"T_max": "10"}, adam(1.0))
    assert isinstance(scheduler, CosineAnnealingLR)
    scheduler.optimizer.step()
    assert sweep(scheduler, 5)[-1] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupLRR", {}, r"scheduler\.type is 'WarmupLRR'.*Did you mean 'WarmupLR'\?.*OneCycle.*StepLR"),
        ("WarmupLR", {"warmup_steps": 3}, r"scheduler\.params\.warmup_steps is not.*Did you mean scheduler\.params\.warmup_num_steps"),
        ("WarmupDecayLR", {}, r"WarmupDecayLR needs scheduler\.params\.total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 0.1}, r"OneCycle needs scheduler\.params\.cycle_max_lr"),
        ("WarmupLR", {"warmup_num_steps": -1}, r"warmup_num_steps is -1; it must be at least 0"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, r'warmup_num_steps is still "auto"'),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, r"warmup_max_lr has 2 values but the optimizer has 1 parameter groups"),
        ("WarmupLR", {"warmup_type": "linaer"}, r"warmup_type is 'linaer'; allowed: log, linear.*'linear'"),
        ("WarmupLR", {"warmup_max_lr": True}, r"warmup_max_lr is True; a number is expected"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, r"cycle_first_step_size is 0"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": "maybe"}, r"cycle_momentum is 'maybe'"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, r"lr_range_test_step_size is 0; it must be at least 1"),
        ("CosineAnnealingLR", {}, r"CosineAnnealingLR needs scheduler\.params\.T_max"),
        ("MultiStepLR", {"milestones": 3}, r"scheduler\.params \{'milestones': 3\} does not fit MultiStepLR"),
    ],
)
def test_mistakes_name_key_value_and_remedy(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_scheduler(name, params, adam())


@pytest.mark.parametrize("name", ["LambdaLR", "ReduceLROnPlateau", "sequentiallr"])
def test_torch_schedules_that_json_cannot_describe(name: str) -> None:
    with pytest.raises(UnsupportedError, match="Build it in code"):
        build_scheduler(name, {}, adam())


def test_one_cycle_tells_the_momentum_of_deepspeed_before_the_first_step() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    scheduler = OneCycle(optimizer, cycle_min_lr=1e-3, cycle_max_lr=1e-2, cycle_first_step_size=5, cycle_min_mom=0.08, cycle_max_mom=0.09)
    assert scheduler.get_mom() == [(0.09, 0.99)] and optimizer.param_groups[0]["betas"] == (0.08, 0.99)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_mom() == [optimizer.param_groups[0]["betas"]] == [(0.08, 0.99)]


def test_one_cycle_takes_numbers_per_group() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.Adam(groups)
    momenta = {"cycle_min_mom": [0.8, 0.85], "cycle_max_mom": [0.9, 0.95]}
    scheduler = OneCycle(optimizer, [0.1, 0.2], [1.0, 2.0], cycle_first_step_size=5, **momenta)
    assert scheduler.step_ratio == 0.5 and [group["betas"][0] for group in optimizer.param_groups] == [0.8, 0.85]
    scheduler.step(4)
    assert scheduler.get_lr() == [1.0, 2.0] and [group["betas"][0] for group in optimizer.param_groups] == pytest.approx([0.8, 0.85])
    scheduler.step(9)
    assert scheduler.get_lr() == [0.1, 0.2] and [group["betas"][0] for group in optimizer.param_groups] == pytest.approx([0.9, 0.95])
    with pytest.raises(ConfigError, match="cycle_max_mom has 3 values but the optimizer has 2"):
        OneCycle(optimizer, 0.1, 1.0, cycle_max_mom=[0.9, 0.95, 0.99])


def test_warmup_cosine_tells_its_ratio() -> None:
    scheduler = WarmupCosineLR(adam(), 8, warmup_num_steps=4, warmup_type="linear")
    ratios = [scheduler.get_lr_ratio()]
    for _ in range(4):
        scheduler.step()
        ratios.append(scheduler.get_lr_ratio())
    assert ratios == pytest.approx([0.0, 0.0, 0.25, 0.5, 0.75])
