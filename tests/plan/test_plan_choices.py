"""Plans of layers that call experts of a list one by one: what they compute is what evenly spread tokens would."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.errors import UnsupportedError
from hf_zero.plan.inputs import ModelWish
from hf_zero.plan.models import build_model
from tests.plan.listed_forms import CHOICES, COUNT, VOCAB, WIDTH
from tests.plan.listed_forms import __file__ as FORMS
from tests.plan.plan_cases import BF16
from tests.support import planned

SAMPLES, LENGTH, LAYERS = 2, 16, 2
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def plan(form: str, **config: Any) -> Any:
    return planned.plan(f"python:{FORMS}:build", {"form": form}, {**BF16, **config}, SAMPLES, LENGTH, {}, world=2)


@pytest.mark.fast_rows("counts-2", "switch-1")
@pytest.mark.parametrize(("form", "choices"), [("masks", CHOICES), ("counts", CHOICES), ("switch", 1)])
def test_experts_compute_what_tokens_choose(form: str, choices: int) -> None:
    tokens = SAMPLES * LENGTH
    routers = 2 * LAYERS * tokens * WIDTH * COUNT
    forward = routers + 2 * LAYERS * tokens * choices * 3 * WIDTH * 2 * WIDTH + 2 * tokens * WIDTH * VOCAB
    for config, again in (({"zero_optimization": {"stage": 3}}, 0), (EXPERTS, routers)):  # a divided layer runs twice
        told = plan(form, **config)
        assert told.observation.per_step().work.flops == 3 * forward + again  # backward takes twice a forward
        assert any("evenly over experts" in reason for reason in told.reasons)


def test_shapes_of_other_values_are_refused(tmp_path: Any) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Picks(nn.Linear):\n    def forward(self, input_ids):\n"
        "        hidden = super().forward(input_ids.float())\n        return hidden[hidden > 0].sum()\n\n\n"
        "def build():\n    return Picks(8, 8)\n"
    )
    assert build_model(ModelWish(f"python:{file}:build", {})).module is not None
    with pytest.raises(UnsupportedError, match="shapes in its forward depend on values"):
        planned.plan(f"python:{file}:build", {}, {}, 2, 8, {}, world=1)
