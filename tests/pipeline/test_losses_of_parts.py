"""How the losses of parts make up that of a batch: the way that is right, also where another is near it."""

from __future__ import annotations

import pytest
import torch

from hf_zero.pipeline import micro_batches
from hf_zero.pipeline.forward import PipelinedForward


@pytest.mark.parametrize("right", ["next tokens", "tokens", "samples"])
def test_the_nearest_way_is_taken(right: str) -> None:
    labels = torch.zeros(4, 8, dtype=torch.long)
    labels[0, 3:] = micro_batches.IGNORED
    labels[3, :2] = micro_batches.IGNORED
    parts = [{"labels": labels[:2]}, {"labels": labels[2:]}]
    results = [{"loss": torch.tensor(4.560)}, {"loss": torch.tensor(4.575)}]  # an untrained model's: much alike
    weights = micro_batches.weights_of(parts, right)
    whole = {"loss": results[0]["loss"] * weights[0] + results[1]["loss"] * weights[1]}
    assert PipelinedForward._agreeing(whole, results, parts, ["next tokens", "tokens", "samples"]) == right


def test_a_loss_that_is_no_mean_is_told() -> None:
    parts = [{"labels": torch.zeros(1, 4, dtype=torch.long)}] * 2
    results = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}]
    assert PipelinedForward._agreeing({"loss": torch.tensor(1.9)}, results, parts, ["tokens", "samples"]) is None
