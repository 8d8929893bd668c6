"""Test the parity reference itself: equal to plain DDP in fp32, to itself in two ways, and sensitive to errors that it must detect."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.parity import LIMITS, Run, Trace, check, difference, mean_over_ranks, reference, reference_case


def _train_ddp(name: str, run: Run) -> Trace:
    """Train with DDP, torch AdamW and torch's clipping."""
    case = CASES[name]
    model = DistributedDataParallel(case.build())
    settings = {"lr": run.lr, "betas": (0.9, 0.99), "eps": run.eps, "weight_decay": run.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    trace = Trace()
    for step in range(run.steps):
        losses = []
        for micro in range(run.accumulation):
            model.require_backward_grad_sync = micro == run.accumulation - 1
            loss = case.forward(model, case.rows(step, micro, ranks.rank()))
            (loss / run.accumulation).backward()
            losses.append(loss.item())
        limit = run.clip or float("inf")
        trace.losses.append(mean_over_ranks(losses))
        trace.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        trace.skipped.append(False)
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    trace.masters = trace.weights
    return trace


def _ddp_equals_reference(name: str) -> None:
    for accumulation, clip in ((1, 0.0), (3, 0.1)):
        run = Run(accumulation=accumulation, clip=clip)
        check(_train_ddp(name, run), reference_case(name, run, ranks.world()), run, label=f"DDP {name}")


@pytest.mark.fast_rows("gpt2", "albert", "conv")
@pytest.mark.parametrize("name", ["gpt2", "bart", "albert", "vit", "conv"])
def test_reference_is_what_ddp_does(name: str) -> None:
    ranks.run_ranks(_ddp_equals_reference, 2, name)


@pytest.mark.parametrize("name", ["llama", "mlp", "tied_coder"])
def test_parts_add_up_to_the_concatenated_batch(name: str) -> None:
    run = Run(accumulation=3, clip=0.1)
    case = CASES[name]
    parts = reference(case.build(), case.rows, case.forward, run, world=2)
    check(parts, reference_case(name, run, world=2), run, label=name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_reference_follows_fp32(dtype: str) -> None:
    low = reference_case("gpt2", Run(dtype=dtype), world=2)
    high = reference_case("gpt2", Run(), world=2)
    assert low.losses == pytest.approx(high.losses, rel=0.02)
    assert low.norms == pytest.approx(high.norms, rel=0.05)


def test_the_checker_notices_a_wrong_factor_a_wrong_order_and_a_stale_copy() -> None:
    run = Run(dtype="bf16")
    case = CASES["gpt2"]
    expected = reference_case("gpt2", run, world=2)

    def other_feed(step: int, micro: int, rank: int) -> Batch:
        return case.rows(step, micro, 1 - rank if step else 0)

    wrong = reference(case.build(), other_feed, case.forward, run, world=2)
    assert not difference(wrong, expected).within(LIMITS["bf16"])
    unclipped = reference_case("gpt2", Run(dtype="bf16", clip=0.1), world=2)
    assert not difference(unclipped, expected).within(LIMITS["bf16"])
    stale = deepcopy(expected)
    stale.weights["transformer.wte.weight"][0, 0] += 2**-4
    with pytest.raises(AssertionError):
        check(stale, expected, run)


def test_reference_skips_an_overflow_and_halves_the_scale() -> None:
    run = Run(dtype="fp16", scale_power=18, steps=4)
    trace = reference_case("mlp", run, world=1)
    assert trace.skipped[0] and not trace.skipped[-1]
