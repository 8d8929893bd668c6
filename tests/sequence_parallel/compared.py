"""Rows of tables of models: each is trained over parts of sequences and compared with itself on whole ones."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tests.support import ranks

LOSS, GRAD = 1e-5, 1e-4
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sequence-parallel.md"


@dataclass
class Compared:
    """One model: relative errors of loss and gradients, or why it is refused."""

    name: str
    loss: float = 0.0
    grad: float = 0.0
    refused: str = ""
    error: str = ""

    @property
    def exact(self) -> bool:
        """Equal to whole sequences."""
        return not (self.refused or self.error) and self.loss < LOSS and self.grad < GRAD

    @property
    def said(self) -> str:
        """The result in words."""
        return "exact" if self.exact else self.refused or self.error or f"WRONG loss {self.loss:.1e} grad {self.grad:.1e}"


AnyRow = TypeVar("AnyRow", bound=Compared)
Losses = list[Tensor]


def compare(row: AnyRow, whole: nn.Module, divided: nn.Module, expect: Callable[[], Losses], bind: Callable[[], Any], train: Any) -> AnyRow:
    """Fill ``row``; on every rank of the group.

    Args:
        row: Of the model.
        whole: The model that ``expect`` trains.
        divided: The model that ``bind`` and ``train`` use.
        expect: Trains on whole sequences and returns the losses; what it raises says that the model takes no such batch.
        bind: Makes forwards of ``divided`` forwards over parts of sequences; raises an error of hf_zero where it refuses the model. It is
            called for models that do not train on whole sequences, too.
        train: Called with what ``bind`` has returned; trains and returns the losses.
    """
    from hf_zero.errors import HfZeroError

    expected: Losses = []
    try:
        expected = [loss.detach() for loss in expect()]
    except Exception as error:  # noqa: BLE001 - any of them says that it takes no such batch
        row.error = f"whole sequences end with {_line(error)}"
    try:
        bound = bind()
        if row.error:
            return row
        found = [loss.detach() for loss in train(bound)]
    except HfZeroError as error:
        row.refused = str(error)
        return row
    except Exception as error:  # noqa: BLE001 - to be told in the table
        row.error = row.error or _line(error)
        return row
    row.loss = max(float((mine - theirs).abs() / theirs.abs()) for mine, theirs in zip(found, expected, strict=True))
    row.grad = worst_gradient(whole, divided)
    return row


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:90]}"


def worst_gradient(whole: nn.Module, divided: nn.Module) -> float:
    """Largest difference against the largest element of all; the ranks' mean is what is compared."""
    worst = 0.0
    largest = max(float(param.grad.abs().max()) for param in whole.parameters() if param.grad is not None)
    for mine, theirs in zip(divided.parameters(), whole.parameters(), strict=True):
        grad = mine.grad if mine.grad is not None else torch.zeros_like(mine)
        torch.distributed.all_reduce(grad)
        expected = theirs.grad if theirs.grad is not None else torch.zeros_like(theirs)
        worst = max(worst, float((grad / ranks.world() - expected).abs().max()) / largest)
    return worst


def each_of(measure: Callable[[str], AnyRow], names: Iterable[str]) -> list[AnyRow]:
    """Rows of ``names``, one after the other, on this rank."""
    warnings.simplefilter("ignore")
    return [measure(name) for name in names]


def measure_all(
    measure: Callable[[str], AnyRow], names: Sequence[str], lost: Callable[[str], AnyRow], world: int = 2, at_once: int = 6, **launch: Any
) -> list[AnyRow]:
    """Rows of ``names`` by ``measure`` on ``world`` ranks; a group that hangs or dies is tried one by one.

    Args:
        measure: Measures one model, on each rank.
        names: The models.
        lost: Returns the row of a model whose ranks hang or die.
        world: Number of ranks.
        at_once: Models of one launch.
        **launch: For ``run_ranks``.
    """
    rows: list[AnyRow] = []
    for start in range(0, len(names), at_once):
        part = names[start : start + at_once]
        try:
            rows += ranks.run_ranks(partial(each_of, measure), world, part, timeout=300.0, **launch)[0]
        except ranks.RankError as error:
            if len(part) > 1:
                rows += [row for name in part for row in measure_all(measure, [name], lost, world, 1, **launch)]
                continue
            rows.append(lost(part[0]))
            rows[-1].error = str(error).strip().splitlines()[-1][:120]
        for row in rows[-len(part) :]:
            print(world, row.name, row.said, flush=True)
    return rows


def publish(rows: Sequence[Compared], results: Path, table: str) -> None:
    """Write the results, and the table in its place on the page: its first line begins it there, and its last one ends it."""
    results.write_text(json.dumps([asdict(row) for row in rows], indent=0) + "\n", encoding="utf-8")
    page, lines = PAGE.read_text(encoding="utf-8"), table.splitlines()
    PAGE.write_text(page.split(lines[0])[0] + table + page.split(lines[-1])[1], encoding="utf-8")


def published(kind: Callable[..., AnyRow], results: Path) -> list[AnyRow]:
    """The published results."""
    return [kind(**row) for row in json.loads(results.read_text(encoding="utf-8"))]
