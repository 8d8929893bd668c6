"""Test ``hf_zero/core/step/precision.py``. Run: ``pytest tests/core/test_engine_loss_scale.py``."""

from __future__ import annotations

import json
import math

import pytest

from hf_zero.core.step.precision import LossScaler
from hf_zero.errors import CheckpointError, ConfigError, StateError

pytestmark = pytest.mark.quick


def scales(scaler: LossScaler, overflows: str) -> list[float]:
    """Return the scale after each step; ``x`` is an overflow, ``.`` a good step."""
    seen = []
    for step in overflows:
        scaler.update(step == "x")
        seen.append(scaler.scale)
    return seen


def test_defaults_are_those_of_the_fp16_section() -> None:
    scaler = LossScaler()
    assert scaler.dynamic
    assert (scaler.scale, scaler.window, scaler.hysteresis, scaler.min_scale) == (65536.0, 1000, 2, 1.0)
    assert scaler.consecutive_hysteresis is False


@pytest.mark.parametrize("pattern", ["xxxx", "....", "x..x"])
def test_static_scale_never_moves(pattern: str) -> None:
    assert scales(LossScaler(loss_scale=128), pattern) == [128.0] * 4


def test_a_scale_of_one_is_static() -> None:
    scaler = LossScaler(loss_scale=1.0)
    assert not scaler.dynamic
    assert scales(scaler, "x.x.") == [1.0] * 4


@pytest.mark.parametrize(
    ("options", "pattern", "expected"),
    [
        # one good step opens the window, then every loss_scale_window good steps double the scale
        ({"loss_scale_window": 2, "hysteresis": 1}, "......", [16, 16, 32, 32, 64, 64]),
        ({"loss_scale_window": 1, "hysteresis": 1}, "....", [16, 32, 64, 128]),
        # an overflow closes the window
        ({"loss_scale_window": 2, "hysteresis": 1}, "..x...", [16, 16, 8, 8, 8, 16]),
        # hysteresis - 1 overflows are tolerated, then each one halves; the tolerance does not come back by itself
        ({"loss_scale_window": 100, "hysteresis": 3}, "xx.x.x", [16, 16, 16, 8, 8, 4]),
        # a tolerated overflow also closes the window
        ({"loss_scale_window": 2, "hysteresis": 3}, "..x..", [16, 16, 16, 16, 16]),
        # growth refills the tolerance
        ({"loss_scale_window": 2, "hysteresis": 2}, "x...xx", [16, 16, 16, 32, 32, 16]),
        # consecutive_hysteresis refills it after every good step
        ({"loss_scale_window": 100, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [16] * 5 + [8]),
        ({"loss_scale_window": 100, "hysteresis": 2, "consecutive_hysteresis": False}, "x.x.xx", [16, 16, 8, 8, 4, 2]),
    ],
)
def test_dynamic_scale(options: dict, pattern: str, expected: list[int]) -> None:
    assert scales(LossScaler(initial_scale_power=4, **options), pattern) == expected


def test_the_scale_never_falls_below_its_minimum() -> None:
    assert scales(LossScaler(initial_scale_power=3, hysteresis=1, min_loss_scale=3), "xx") == [4.0, 3.0]


def test_overflow_at_the_minimum_is_an_error() -> None:
    scaler = LossScaler(initial_scale_power=3, hysteresis=1, min_loss_scale=2)
    assert scales(scaler, "xx") == [4.0, 2.0]
    with pytest.raises(StateError, match=r"fp16\.min_loss_scale 2"):
        scaler.update(overflow=True)
    assert scaler.scale == 2.0
    assert scales(LossScaler(initial_scale_power=3, hysteresis=1, min_loss_scale=2, raises_at_minimum=False), "xxxx") == [4, 2, 2, 2]


def test_state_is_json_and_continues_the_same_sequence() -> None:
    options = {"initial_scale_power": 6, "loss_scale_window": 3, "hysteresis": 2}
    first = LossScaler(**options)
    scales(first, "..x.x..")
    second = LossScaler(**options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    pattern = "..x...xx......"
    assert scales(second, pattern) == scales(first, pattern)


def test_static_config_wins_over_a_saved_dynamic_scale() -> None:
    dynamic, static = LossScaler(initial_scale_power=4), LossScaler(loss_scale=64)
    static.load_state_dict(dynamic.state_dict())
    assert static.scale == 64.0
    dynamic.load_state_dict(static.state_dict())
    assert dynamic.scale == 16.0


def test_loaded_scale_respects_the_present_minimum_and_hysteresis() -> None:
    saved = LossScaler(initial_scale_power=1, hysteresis=5).state_dict()
    scaler = LossScaler(min_loss_scale=8, hysteresis=1)
    scaler.load_state_dict(saved)
    assert scaler.scale == 8.0
    assert scaler.state_dict()["tolerance"] == 1


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"loss_scale": -1}, "fp16.loss_scale"),
        ({"loss_scale": math.nan}, "fp16.loss_scale"),
        ({"loss_scale": "big"}, "fp16.loss_scale"),
        ({"initial_scale_power": 2000}, "fp16.initial_scale_power"),
        ({"loss_scale_window": 0}, "fp16.loss_scale_window"),
        ({"hysteresis": 0}, "fp16.hysteresis"),
        ({"min_loss_scale": 0}, "fp16.min_loss_scale"),
    ],
)
def test_values_out_of_range_are_refused_by_key(options: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        LossScaler(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"scale": -4.0}, "scale -4.0"), ({"good_steps": -1}, "good_steps -1"), ({"tolerance": 0}, "tolerance 0")],
)
def test_broken_state_is_refused(change: dict, message: str) -> None:
    scaler = LossScaler()
    with pytest.raises(CheckpointError, match=message):
        scaler.load_state_dict(scaler.state_dict() | change)
    state = scaler.state_dict()
    del state["tolerance"]
    with pytest.raises(CheckpointError, match="lacks tolerance"):
        scaler.load_state_dict(state)
