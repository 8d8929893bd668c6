"""A plan beside a real job of two ranks: bytes held and sent are equal, to the last one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import planned
from tests.support.plan_cases import BF16, case

FAST = [
    case("gpt2", 3),
    case("llama", 1, steps=2, **BF16),
    case("llama", 3, wish={"trainable": "lora:r=4"}, **BF16),
    case("llama", 1, tensor_parallel={"autotp_size": 2}, **BF16),
]
SLOW = [
    case("llama", 0, **BF16),
    case("gpt2", 2, steps=5, **BF16),
    case("llama", 3, steps=2, **BF16),
    case("gpt2", 2, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}),
    case("llama", 3, wish={"checkpointing": True}, **BF16),
    case("llama", 1, wish={"trainable": "match:layers.2"}, **BF16),
    case("llama", 3, steps=2, zero={"mics_shard_size": 1}, **BF16),
    case("llama", 2, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
]


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest) -> list[tuple[dict[str, Any], Any, Any]]:
    cases = FAST + SLOW if request.config.getoption("--slow") else FAST
    found = []
    for one, held in zip(cases, planned.run_real(cases, 2), strict=True):
        told = planned.plan(one["model"], one["settings"], one["config"], 2, one["samples"], one["length"], **one["wish"])
        found.append((one, held, told))
    return found


def test_what_is_sent_is_what_the_collectives_count(pairs: Any) -> None:
    for one, held, told in pairs:
        sent = told.to_dict()["sent_bytes_per_step"]
        assert (sent["node"], sent["network"]) == (held["sent"], 0), planned.key(one)
        assert held["sent"] > 0


def test_what_is_held_is_what_the_engine_holds(pairs: Any) -> None:
    for one, held, told in pairs:
        kinds = told.by_kind()
        # scalars of a step count (one number for each segment) are held on the host too
        for kind in ("parameters", "masters", "moments"):
            assert kinds[kind] == held[kind], f"{kind} of {planned.key(one)}"


def test_a_checkpoint_holds_masters_and_moments(pairs: Any) -> None:
    told = pairs[0][2]
    parameters, trained = told.observation.parameters
    assert parameters == trained
    assert 12 * parameters <= told.observation.checkpoint_bytes < 12 * parameters + 200_000
