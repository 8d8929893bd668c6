"""Programs with Lightning's Fabric and Trainer and drawn options: all that a user sees is as in the same program under DDP."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="Lightning is not installed (extra: lightning)")

from tests.lightning import drawn_loops
from tests.lightning.drawn_options import changed, draw, full
from tests.support import ranks
from tests.support.rows import slow_but

FEW, MANY = 6, 60  # programs of a seed


def differences(run: dict[str, Any], folder: Path) -> list[str]:
    """Return the differences that no named error explains."""
    found = ranks.run_ranks(drawn_loops.compared, 2, run, folder, group=False)
    return sorted({line for lines in found for line in lines if not line.startswith(drawn_loops.EXPLAINED)})


@pytest.mark.parametrize("kind", drawn_loops.KINDS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_drawn_loops(kind: str, seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    for index in range(MANY if seed else FEW):
        run = draw(source, kind)
        found = differences(run, tmp_path / str(index))
        assert not found, f"{changed(run)}: {found[:5]}"


# What was lost or wrong without the mechanism that a case names.
FABRIC: dict[str, dict[str, Any]] = {
    "no clipping unless it is asked for": {"stage": 2, "optimizer": "sgd"},
    "clipping by norm": {"stage": 3, "clip": "norm", "accumulation": 2},
    "clipping by value": {"stage": 1, "clip": "value", "optimizer": "sgd", "precision": "16-mixed"},
    "clipping by value with torch": {"stage": 3, "clip": "torch value", "optimizer": "groups"},
    "clipping where a parameter begins to train": {"stage": 0, "clip": "norm", "frozen": "unfreezes"},
    "clipping by value where a parameter begins to train": {"stage": 2, "clip": "torch value", "frozen": "unfreezes", "rows": 22},
    "clipping with torch where a parameter begins to train": {"stage": 0, "clip": "torch", "frozen": "unfreezes"},
    "backwards of two models before their steps": {"stage": 3, "second": "interleaved"},
    "one loss of two models": {"stage": 2, "second": "one loss"},
    "a scheduler that the loop steps": {"stage": 3, "setup": "with scheduler", "optimizer": "sgd"},
    "backwards without reduction": {"stage": 1, "accumulation": 3, "pattern": "no_sync", "optimizer": "sgd"},
}
TRAINER: dict[str, dict[str, Any]] = {
    "the last accumulation of an epoch": {"stage": 3, "accumulation": 3, "rows": 22, "scheduler": "step", "logs": "both"},
    "a module's own backward": {"stage": 2, "hook": "backward", "accumulation": 2, "optimizer": "sgd"},
    "a module's own backward with a loss scale": {"stage": 3, "hook": "backward", "precision": "16-mixed"},
    "clipping by value": {"stage": 3, "clip": "value", "accumulation": 2, "optimizer": "sgd"},
    "norms of gradients": {"stage": 2, "hook": "before step", "clip": "hook"},
}
OWN = "Lightning's own strategy"
STOCK = {
    f"{OWN}: the last accumulation of an epoch, clipping": {"accumulation": 3, "rows": 22, "clip": "norm", "optimizer": "sgd"},
    f"{OWN}: clipping by value": {"stage": 2, "clip": "value", "optimizer": "sgd"},
}
TRAINER |= {name: {"strategy": "stock", "stage": 3, **case} for name, case in STOCK.items()}
FABRIC[OWN] = {"strategy": "stock", "accumulation": 3, "optimizer": "sgd", "setup": "with scheduler", "clip": "norm"}
CASES = [{"kind": "fabric", **case} for case in FABRIC.values()] + [{"kind": "trainer", **case} for case in TRAINER.values()]


@pytest.mark.parametrize("case", CASES, ids=[*FABRIC, *(f"{name} (Trainer)" for name in TRAINER)])
def test_a_program_is_that_under_ddp(case: dict[str, Any], tmp_path: Path) -> None:
    found = ranks.run_ranks(drawn_loops.compared, 2, full(case), tmp_path, group=False)
    assert not any(found), found[0][:5]


REFUSED = [
    ({"kind": "fabric", "stage": 2, "setup": "with scheduler", "scheduler": "epoch"}, "the engine has stepped it at each of them"),
    ({"kind": "trainer", "stage": 3, "callback": "average"}, "is divided over the ranks"),
    ({"kind": "fabric", "stage": 2, "clip": "inf"}, "the engine computes the 2-norm"),
    ({"kind": "fabric", "stage": 1, "setup": "module first"}, "to be set up jointly"),
]


@pytest.mark.parametrize("refused", slow_but(REFUSED, *REFUSED[:2]), ids=lambda refused: refused[1])
def test_what_is_not_served_is_one_error_on_all_ranks(refused: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    case, text = refused
    first, second = ranks.run_ranks(drawn_loops.compared, 2, full(case), tmp_path, group=False)
    assert first == second and first[0].startswith(drawn_loops.EXPLAINED) and text in first[0], first
