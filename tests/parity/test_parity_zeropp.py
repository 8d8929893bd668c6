"""ZeRO++ against plain PyTorch with the same rounding: the same bits, on 2 and 4 ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.support import ranks
from tests.support import zeropp_reference as reference
from tests.support.models import CASES, Batch, cast_floats, class_loss
from tests.support.parity import DTYPES, SMALL_MODEL, Run, full_masters, initialize, train

STEPS = 12
KEEP = 0.8


def zeropp(stage: int, dtype: str = "bf16", steps: int = STEPS, accumulation: int = 1, clip: float = 0.0, **zero: Any) -> Run:
    """A run with keys of ZeRO++; ``w``, ``g`` and ``loco`` are short for them."""
    names = {"w": "zero_quantized_weights", "g": "zero_quantized_gradients", "loco": "zeropp_loco_param"}
    section = {"stage": stage, **SMALL_MODEL, **{names.get(key, key): value for key, value in zero.items()}}
    return Run(stage=stage, dtype=dtype, steps=steps, accumulation=accumulation, clip=clip, extra={"zero_optimization": section})


def places_of(engine: Any) -> reference.Places:
    units = [unit.layout for unit in engine.units]
    return [(layout.padded_numel, [(slot.name, slot.offset, slot.numel) for slot in layout.slots]) for layout in units]


def train_case(name: str, run: Run) -> Any:
    """Rank 0 returns the trace and where the parameters lie."""
    case = CASES[name]

    def feed(step: int, micro: int, rank: int) -> Batch:
        return case.rows(step % 4, micro, rank)

    engine = initialize(case.build(), run)
    trace = train(engine, feed, case.forward, run)
    places = places_of(engine)
    same = engine.collectives.gather_objects([trace.norms, [float(value.double().sum()) for value in trace.masters.values()]], "test")
    engine.destroy()
    assert all(other == same[0] for other in same), "norms and weights are alike on all ranks"
    return (trace, places) if ranks.rank() == 0 else None


def expected(name: str, run: Run, settings: reference.Settings, places: reference.Places) -> reference.Outcome:
    case = CASES[name]

    def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
        return case.forward(model, cast_floats(case.rows(step % 4, micro, rank), DTYPES[run.dtype]))

    return reference.run(case.build(), loss_of, settings, places)


@pytest.mark.parametrize(
    ("case", "world", "stage", "keys"),
    [
        ("odd_mlp", 2, 3, {"w": True}),
        ("odd_mlp", 2, 3, {"g": True}),
        ("odd_mlp", 4, 3, {"w": True, "g": True}),
        ("odd_mlp", 2, 3, {"w": True, "g": True, "loco": {"err_beta": KEEP}}),
        ("odd_mlp", 4, 3, {"g": True, "loco": {"err_beta": KEEP, "reset_T": 3}}),
        ("odd_mlp", 2, 1, {"g": True}),
        ("odd_mlp", 2, 2, {"g": True, "loco": {"err_beta": 0.0}}),
    ],
)
def test_equals_plain_pytorch_bit_for_bit(case: str, world: int, stage: int, keys: dict[str, Any]) -> None:
    _equals(case, world, zeropp(stage, **keys), keys)


def test_accumulation_and_clipping() -> None:
    keys = {"w": True, "g": True, "loco": {"err_beta": KEEP}}
    _equals("odd_mlp", 2, zeropp(3, accumulation=2, clip=0.05, **keys), keys)


def test_fp32_weights() -> None:
    _equals("odd_mlp", 2, zeropp(3, dtype="fp32", w=True), {"w": True})


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_transformers(case: str) -> None:
    keys = {"w": True, "g": True, "loco": {"err_beta": KEEP}}
    _equals(case, 4, zeropp(3, steps=4, **keys), keys)


def _equals(name: str, world: int, run: Run, keys: dict[str, Any]) -> None:
    trace, places = ranks.run_ranks(train_case, world, name, run)[0]
    loco = keys.get("loco")
    settings = reference.Settings(
        world, run.steps, "w" in keys, "g" in keys, loco and loco.get("err_beta"), (loco or {}).get("reset_T", 1024), DTYPES[run.dtype],
        run.accumulation, run.clip,
    )  # fmt: skip
    wanted = expected(name, run, settings, places)
    assert trace.losses == wanted.losses
    assert trace.norms == pytest.approx(wanted.norms, rel=1e-6)
    different = [name for name, master in trace.masters.items() if not torch.equal(master, wanted.masters[name])]
    assert not different
