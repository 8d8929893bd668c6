"""Test torch.compile of the blocks or through the engine: the same numbers, with the engine's hooks outside the graphs."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from torch import nn

from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import Run, check, check_training, initialize, reference_case, train

STAGES = (0, 1, 2, 3)


def _compile_blocks(run: Run, backend: str) -> None:
    """Compile the blocks before ``initialize``, as regional compilation does."""
    torch._dynamo.reset()

    def build() -> nn.Module:
        model = CASES["mlp"].build()
        for block in model.blocks:
            block.compile(backend=backend)
        return model

    check_training(build, CASES["mlp"].rows, class_loss, run, label=f"compiled blocks, {backend}")


def _compile_engine(run: Run, name: str, backend: str) -> None:
    torch._dynamo.reset()
    case = CASES[name]
    engine = initialize(case.build(), run)
    engine.compile(backend=backend)
    trace = train(engine, case.rows, case.forward, run)
    engine.destroy()
    if ranks.rank() == 0:
        check(trace, partial(reference_case, name, run, ranks.world()), run, f"engine.compile, {backend}")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_compiled_blocks(stage: int, dtype: str, backend: str) -> None:
    ranks.run_ranks(_compile_blocks, 2, Run(stage=stage, dtype=dtype, accumulation=2), backend, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
@pytest.mark.parametrize("stage", STAGES)
def test_engine_compile(stage: int, name: str) -> None:
    ranks.run_ranks(_compile_engine, 2, Run(stage=stage, accumulation=2), name, "aot_eager", timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("stage", STAGES)
def test_compiled_blocks_with_inductor(stage: int) -> None:
    ranks.run_ranks(_compile_blocks, 2, Run(stage=stage, accumulation=2), "inductor", timeout=600)
