"""Compiled blocks with every kind of parallelism, adapters, checkpointing and offload.

They have the numbers of uncompiled runs, bit for bit, no graph break inside of a block, and no graph after the second step.
"""

from __future__ import annotations

import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.compiled.breadth import PAGE, START, STOP, measure, saved, table
from tests.compiled.runs import LAYERS, Case, Seen, both
from tests.support import ranks

KINDS = ("lora", "tp", "sp", "ep", "pp")
ONE_BREAK = {"ep"}  # kinds whose blocks have a part that no graph can contain


def _check(case: Case, plain: Seen, compiled: Seen) -> None:
    assert compiled.values == plain.values, case
    weights = {name.replace("_orig_mod.", ""): value for name, value in compiled.weights.items()}
    assert weights.keys() == plain.weights.keys()
    assert all(torch.equal(value, plain.weights[name]) for name, value in weights.items()), case
    graphs, breaks = zip(*compiled.counts, strict=True)
    assert graphs[-1] == graphs[1] > 0, (case, compiled.counts)
    assert breaks[-1] == breaks[1], (case, compiled.counts)
    if (case.way, case.kind) == ("regions", "lora") and case.checkpointing:
        # A region is the embedding, with the hook by which PEFT lets the inputs need a gradient; plain PyTorch breaks there as well.
        assert breaks[-1] == 1 and all("requires_grad_" in reason for reason in compiled.breaks), (case, compiled.breaks)
    elif case.kind not in ONE_BREAK:
        assert breaks[-1] == 0, (case, compiled.breaks)
        first = 2 if case.kind == "lora" or case.use_cache else 1
        assert case.way == "regions" or graphs[0] <= first, (case, compiled.counts)
    else:
        assert all("disable" in reason for reason in compiled.breaks), compiled.breaks


def _check_all(cases: list[Case], folder: Path) -> None:
    for case, (plain, compiled) in zip(cases, ranks.run_ranks(both, 2, cases, str(folder), timeout=240 * len(cases))[0], strict=True):
        _check(case, plain, compiled)


@pytest.mark.parametrize(
    "case",
    [Case(3, "engine", "tp", backend="eager"), pytest.param(Case(1, "engine", "sp", backend="eager"), marks=pytest.mark.slow)],
    ids=["tp", "sp"],
)
def test_parallelism_inside_of_blocks(case: Case, tmp_path: Path) -> None:
    """Collectives of split layers and of sliced sequences are operations of the graph; experts are left out of it."""
    _check_all([case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_at_every_stage(kind: str, stage: int, tmp_path: Path) -> None:
    if kind == "pp" and stage == 3:
        pytest.skip("pipelines are refused at stage 3")
    _check_all([Case(stage, "engine", kind)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("way", ["engine", "regions", "before", "wrapped"])
def test_memory_savings(way: str, stage: int, tmp_path: Path) -> None:
    given = itertools.product(("", "lora"), ("", "reentrant", "not reentrant"))
    cases = [Case(stage, way, kind, checkpointing) for kind, checkpointing in given]
    _check_all([*cases, Case(stage, way, offload=True), Case(stage, way, dtype="bf16")], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("kind", ["", "tp", "sp"])
def test_inductor(kind: str, tmp_path: Path) -> None:
    """Its kernels round otherwise; counts are as they are with other backends."""
    case = Case(3, "engine", kind, backend="inductor", generates=False)
    [(plain, compiled)] = ranks.run_ranks(both, 2, [case], str(tmp_path), timeout=900)[0]
    assert compiled.values == pytest.approx(plain.values, rel=1e-4)
    assert compiled.counts[-1] == (compiled.counts[1][0], 0)


def test_published_architectures() -> None:
    rows = saved()
    assert len(rows) >= 60 and not [row for row in rows if not (row.good or row.error)]
    page = PAGE.read_text(encoding="utf-8")
    both = table(rows), START + page.split(START)[1].split(STOP)[0] + STOP
    mine, published = (re.sub(r"transformers \d\S*,", "transformers,", text).splitlines()[1:] for text in both)  # the installed version
    assert mine == published


@pytest.mark.slow  # `test_compiled_blocks.py` compiles a Llama in every way
def test_an_architecture_is_what_was_published() -> None:
    known = {row.name: row for row in saved()}
    found = ranks.run_ranks(measure, 1, "LlamaForCausalLM", timeout=300)[0]
    # transformers lists the class under several types, and which one comes first depends on its version.
    assert found == replace(known["LlamaForCausalLM"], model_type=found.model_type)
    assert found.breaks == found.later == 0 and found.equal and found.blocks == LAYERS
