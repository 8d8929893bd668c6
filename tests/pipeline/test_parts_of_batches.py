"""Batches in parts train like whole batches where parts differ: in their labels, in their loss, or in state that a forward changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.pipelines import check, train
from tests.support import parity, ranks
from tests.support.models import VOCAB, Batch, ModelCase
from tests.support.parity import Run
from tests.support.tp_training import compare_trained, reference_of, zoo_case

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


# ------------------------------------------------------------------------------------------------ losses that no weights make up


class Own(nn.Module):
    """A model of a script: layers with state of ``kind``, and a loss of ``loss``."""

    def __init__(self, kind: str, loss: str) -> None:
        super().__init__()
        self.table, self.loss = nn.Embedding(VOCAB, 8), loss
        self.layers = nn.ModuleList([OwnLayer(kind) for _ in range(2)])
        self.head = nn.Linear(8, VOCAB)
        nn.init.normal_(self.head.weight, std=1e-3)  # losses near log(VOCAB), whatever the weights of parts

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        if self.loss == "mean of kept tokens":
            each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            return {"loss": (each * attention_mask.flatten()).sum() / attention_mask.sum(), "logits": logits}  # type: ignore[union-attr]
        options: dict[str, Any] = {
            "mean": {},
            "zeros ignored": {"ignore_index": 0},
            "weighted": {"weight": torch.linspace(0.05, 3, VOCAB)},
        }[self.loss]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options), "logits": logits}


class OwnLayer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.norm = kind, nn.Linear(8, 8), nn.BatchNorm1d(8) if kind == "batch norm" else nn.LayerNorm(8)
        if kind == "spectral norm":
            nn.utils.parametrizations.spectral_norm(self.up)
        if kind == "average":
            self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden: Tensor) -> Tensor:
        inside = torch.tanh(self.up(hidden))
        if self.kind == "average":
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(inside.mean((0, 1)), 0.1)
            inside = inside - self.mean
        total = hidden + inside
        return self.norm(total.transpose(1, 2)).transpose(1, 2) if self.kind == "batch norm" else self.norm(total)


def _own_batch(generator: torch.Generator, rows: int) -> Batch:
    tokens = torch.randint(1, VOCAB, (rows, 12), generator=generator)
    labels = tokens.clone()
    labels[0, 3:] = 0
    return {"input_ids": tokens, "labels": labels}


def check_parts(kind: str, loss: str, parts: int) -> None:
    """A model of ``kind`` and ``loss`` trains as in plain PyTorch, and its batches have ``parts``."""
    case = ModelCase(f"{kind}, {loss}", lambda: Own(kind, loss), _own_batch, lambda model, batch: model(**batch)["loss"])
    run = Run(1, clip=0.1)
    losses, norms, weights, engine = train(case, run, 2)
    assert engine.module.forward.parts == parts, case.name
    engine.destroy()
    if weights is not None:
        compare_trained(reference_of(case, run, 1), losses, norms, weights, run)


def _masked_batch(generator: torch.Generator, rows: int) -> Batch:
    return {**_own_batch(generator, rows), "attention_mask": torch.ones(rows, 12, dtype=torch.long)}


def _first_row_padded(batch: Batch) -> Batch:
    kept = batch["attention_mask"].clone()
    kept[0, 4:] = 0
    return {**batch, "attention_mask": kept}


def check_padding_after_the_first_batch() -> None:
    loss = "mean of kept tokens"
    case = ModelCase(loss, lambda: Own("", loss), _masked_batch, lambda model, batch: model(**batch)["loss"])
    run = Run(1, clip=0.1, steps=3)
    losses, norms, weights, engine = train(_later(case, _first_row_padded), run, 2)
    engine.destroy()
    if weights is not None:
        compare_trained(reference_of(_later(case, _first_row_padded), run, 1), losses, norms, weights, run)


def test_a_mean_over_tokens_of_the_mask_is_recognized_without_padding_in_the_first_batch() -> None:
    ranks.run_ranks(check_padding_after_the_first_batch, 2)


def check_all(rows: list[tuple[str, str, int]]) -> None:
    for row in rows:
        check_parts(*row)


@pytest.mark.parametrize(
    "rows",
    [
        [("", "mean", 2), ("", "zeros ignored", 1), ("", "weighted", 1)],
        [("batch norm", "mean", 1), ("average", "mean", 1), ("spectral norm", "mean", 1)],
    ],
    ids=["losses", "state"],
)
def test_batches_run_whole_where_parts_would_differ(rows: list[tuple[str, str, int]]) -> None:
    """``zeros ignored`` does not know the label of the trial, and raises an error for it."""
    ranks.run_ranks(check_all, 2, rows)
