"""Batches in parts train like whole batches where parts differ: in their labels, in their loss, or in state that a forward changes."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.pipeline.pipelines import check
from tests.support import parity, ranks
from tests.support.models import Batch, ModelCase
from tests.support.parity import Run
from tests.support.tp_training import zoo_case

IGNORED = -100


def _later(case: ModelCase, change: object) -> ModelCase:
    """Return ``case`` with ``change`` made to every batch but the first, which decides how losses of parts add up."""
    first = hash((0, 0, 0)) % (2**31)

    def batch(generator: torch.Generator, rows: int) -> Batch:
        seed = generator.initial_seed()
        made = case.batch(generator, rows)
        return made if seed == first else change(made)  # type: ignore[operator,no-any-return]

    return replace(case, batch=batch)


def _first_row_without_labels(batch: Batch) -> Batch:
    labels = batch["labels"].clone()
    labels[0] = IGNORED
    return {**batch, "labels": labels}


def check_part_without_labels() -> None:
    case = _later(zoo_case("LlamaForCausalLM", {"num_hidden_layers": 2}), _first_row_without_labels)
    check(case, Run(1, clip=0.1), 2)
    engine = parity.initialize(case.build(), replace(Run(1), extra={"pipeline": {"stages": 2}}))
    engine.eval()
    plain = case.build().eval()
    with torch.no_grad():
        for step in range(2):
            batch = case.rows(step, 0, 0)
            torch.testing.assert_close(engine(**batch).loss.cpu(), plain(**batch).loss)
    engine.destroy()


def test_a_part_without_any_label() -> None:
    ranks.run_ranks(check_part_without_labels, 2)
