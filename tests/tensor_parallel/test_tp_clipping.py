"""``torch.nn.utils.clip_grad_norm_`` where ranks have parts of gradients: the norm is that of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.utils import clip_grad_norm_

from tests.support import parity
from tests.support.models import CASES
from tests.support.parity import Run
from tests.support.ranks import run_ranks

AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("llama", {"tensor_parallel": {"autotp_size": 2}}),
    "experts": ("mixtral", {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
}


def clipped(axis: str) -> tuple[float, float]:
    """Return the norm that the function returns, and the norm of the gradients that the step then uses."""
    case, extra = AXES[axis]
    engine = parity.initialize(CASES[case].build(), Run(0, extra=extra))
    engine.backward(engine(**CASES[case].rows(0, 0, 0)).loss)
    norm = float(clip_grad_norm_(engine.module.parameters(), 0.25))
    engine.step()
    return norm, parity.as_float(engine.get_global_grad_norm())


@pytest.mark.parametrize("axis", AXES)
def test_norm_counts_the_parts_of_all_ranks_at_stage_0(axis: str) -> None:
    model = CASES[AXES[axis][0]].build()
    model(**CASES[AXES[axis][0]].rows(0, 0, 0)).loss.backward()
    whole = float(clip_grad_norm_(model.parameters(), 0.25))
    assert run_ranks(clipped, 2, axis) == [pytest.approx((whole, 0.25), rel=1e-4)] * 2
