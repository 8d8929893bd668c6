"""Optimizers that need whole tensors, on the pretend accelerator: what waits are missing shows there, and the numbers are a CPU's."""

from __future__ import annotations

from typing import Any

import pytest

from tests import pretend
from tests.pretend import network
from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run, check
from tests.support.whole_tensors import plain, through_engine

pytestmark = pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())


def _close(name: str, runs: list[Run]) -> None:
    for run in runs:
        check(through_engine(name, "mlp", run), plain(name, CASES["mlp"], run, ranks.world()), run, f"{name}, {run.extra}")


def _on_devices(backend: str, world: int, *args: Any) -> None:
    env = {"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": backend}
    ranks.run_ranks(_close, world, *args, env=env, timeout=200.0)


@pytest.mark.slow  # fast: test_parity_whole_tensors.py, and GPT-2 in test_pretend_engine.py
@pytest.mark.fast_rows("pretend_ccl")
@pytest.mark.parametrize("backend", ["gloo", network.NAME])
def test_training_is_that_of_a_cpu(backend: str) -> None:
    runs = [Run(stage=stage, clip=0.1, accumulation=2) for stage in ((0, 3) if backend == "gloo" else (1, 3))]
    _on_devices(backend, 2, "RowScaled", runs)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", network.NAME])
def test_training_over_three_ranks_is_that_of_a_cpu(backend: str) -> None:
    _on_devices(backend, 3, "LAMB", [Run(stage=stage, clip=0.1, accumulation=2) for stage in (1, 3)])


@pytest.mark.slow  # fast: test_parity_trained_set.py has whole tensors and offloaded states
def test_offloaded_states_are_updated_on_the_host() -> None:
    ways: list[dict[str, Any]] = [
        {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ]
    runs = [Run(stage=3, clip=0.1, extra={"zero_optimization": way}) for way in ways] + [Run(stage=2, extra={"zero_optimization": ways[0]})]
    _on_devices(network.NAME, 2, "Adafactor", runs)
