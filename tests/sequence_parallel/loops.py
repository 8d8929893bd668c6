"""Rows and configurations of scripts of accelerate and Trainer over parts of sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import parity

ROWS = 32


def samples(length: int) -> list[dict[str, torch.Tensor]]:
    """Rows of which the first tokens have no label; the last slice of the last rows has none at all."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for index, tokens in enumerate(torch.randint(3, 64, (ROWS, length), generator=generator)):
        labels = tokens.clone()
        labels[: index % 7] = -100
        if index >= ROWS - 2:
            labels[length // 2 :] = -100
        found.append({"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)})
    return found


def config(stage: int, accumulation: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **parity.SMALL_MODEL},
    }


def close(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=2e-4 if name == "grad_norm" else 2e-5), name
