"""Training of one model under tensor parallelism, compared with one rank, for the ``test_tp_*`` files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.support import parity, ranks, zoo
from tests.support.models import Batch, ModelCase
from tests.support.parity import Run, Trace

LOSS, NORM, WEIGHT = 1e-5, 1e-4, 2e-4


def train(case: ModelCase, run: Run, tp: int) -> tuple[list[float], list[float], dict[str, Tensor] | None, Any]:
    """Return losses and norms of every step, the joined weights on rank 0, and the engine."""
    run = replace(run, extra={"tensor_parallel": {"autotp_size": tp}, **run.extra})
    engine = parity.initialize(case.build(), run)

    def feed(step: int, micro: int, rank: int) -> Batch:
        return case.rows(step, micro, rank // tp)

    losses, norms = [], []
    for step in range(run.steps):
        parts = []
        for micro in range(run.accumulation):
            batch = parity.prepare(feed(step, micro, ranks.rank()), parity.DTYPES[run.dtype])
            parts.append(parity.micro_step(engine, batch, case.forward, micro))
        losses.append(parity.mean_over_ranks(parts))
        norms.append(parity.as_float(engine.get_global_grad_norm()))
    return losses, norms, engine._consolidated_16bit_state_dict(), engine


def check_against_one_rank(case: ModelCase, tp: int, runs: list[Run]) -> None:
    """Check on every rank that losses, gradient norms and trained weights over groups of ``tp`` ranks equal those of one rank."""
    world = ranks.world() // tp
    for run in runs:
        losses, norms, weights, engine = train(case, run, tp)
        engine.destroy()
        if ranks.rank() != 0:
            assert weights is None
            continue
        compare_trained(reference_of(case, run, world), losses, norms, weights, run)


def reference_of(case: ModelCase, run: Run, replicas: int) -> Trace:
    """Return the trace of plain PyTorch on the samples of all replicas."""
    return parity.concatenated_reference(case, run, replicas) if run.dtype == "fp32" else parity.reference_case(case.name, run, replicas)


def compare_trained(expected: Trace, losses: list[float], norms: list[float], weights: dict[str, Tensor] | None, run: Run) -> None:
    """Raise unless losses, gradient norms and weights equal ``expected``, up to the rounding of ``run``'s dtype."""
    factor = 1 if run.dtype == "fp32" else 2e3
    assert losses == pytest.approx(expected.losses, rel=LOSS * factor), (run, losses, expected.losses)
    assert norms == pytest.approx(expected.norms, rel=NORM * factor), (run, norms, expected.norms)
    assert weights is not None
    assert set(expected.weights) <= set(weights)
    for key, value in expected.weights.items():
        assert weights[key].shape == value.shape, key
        worst = (weights[key].float() - value.float()).abs().max() / value.float().abs().max().clamp(min=0.01)
        assert worst < WEIGHT * factor, (run, key, float(worst))


def zoo_case(name: str, changes: dict[str, Any]) -> ModelCase:
    """Return an architecture of the zoo as a case; ``changes`` to its configuration."""
    return ModelCase(
        name,
        lambda: zoo.build(name, changes=changes),
        lambda generator, rows: zoo.batch(name, generator, rows),
        zoo.loss,
    )
