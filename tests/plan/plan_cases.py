"""Small configurations that are planned and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import planned

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 4}}
LISTED = f"python:{Path(__file__).parents[1] / 'support' / 'experts.py'}:build_listed"
"""A model whose layers call experts of a list one by one."""
_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": planned.LLAMA,
    "gpt2": planned.GPT2,
    "mixtral": planned.MIXTRAL,
    "t5": planned.T5,
    LISTED: {},
}


def case(model: str, stage: int, steps: int = 1, wish: dict[str, Any] | None = None, saves: bool = False, **config: Any) -> dict[str, Any]:
    """Two samples of 16 tokens for a small model; every block is gathered anew in backward at stage 3."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 0, **config.pop("zero", {})}
    whole = {"zero_optimization": zero, "optimizer": ADAM, "gradient_accumulation_steps": steps, "gradient_clipping": 1.0, **config}
    settings = _SETTINGS[model]
    return {"model": model, "settings": settings, "config": whole, "samples": 2, "length": 16, "wish": wish or {}, "saves": saves}
