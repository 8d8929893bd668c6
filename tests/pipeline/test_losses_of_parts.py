"""How the losses of parts make up that of a batch: the way that is right, also where another is near it."""

from __future__ import annotations

import pytest
import torch

from hf_zero.pipeline import micro_batches
from hf_zero.pipeline.trial import EXACT, ROUNDED, Trial, matching_weights


@pytest.mark.parametrize("right", ["next tokens", "tokens", "samples"])
def test_the_nearest_way_is_taken(right: str) -> None:
    labels = torch.zeros(4, 8, dtype=torch.long)
    labels[0, 3:] = micro_batches.IGNORED
    labels[3, :2] = micro_batches.IGNORED
    parts = [{"labels": labels[:2]}, {"labels": labels[2:]}]
    results = [{"loss": torch.tensor(4.560)}, {"loss": torch.tensor(4.575)}]  # an untrained model's: much alike
    weights = micro_batches.weights_of(parts, right)
    whole = {"loss": results[0]["loss"] * weights[0] + results[1]["loss"] * weights[1]}
    trials = [Trial(result) for result in results]
    assert matching_weights(Trial(whole), trials, parts, ["next tokens", "tokens", "samples"], ROUNDED) == right


def test_a_loss_that_is_no_mean_is_told() -> None:
    parts = [{"labels": torch.zeros(1, 4, dtype=torch.long)}] * 2
    results = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}]
    trials = [Trial(result) for result in results]
    assert matching_weights(Trial({"loss": torch.tensor(1.9)}), trials, parts, ["tokens", "samples"], ROUNDED) is None


@pytest.mark.parametrize(("weights", "found"), [((0.5, 0.5), "samples"), ((0.51, 0.49), None)])
def test_gradients_tell_what_losses_do_not(weights: tuple[float, float], found: str | None) -> None:
    """Equal losses of parts make up the loss of the batch with any weights."""
    parts = [{"labels": torch.zeros(1, 4)}] * 2
    gradient = torch.ones(1, 3)
    trials = [Trial({"loss": torch.tensor(4.0)}, [gradient, None]) for _ in parts]
    whole = Trial({"loss": torch.tensor(4.0)}, [torch.cat([gradient * weight for weight in weights]), None])
    assert matching_weights(whole, trials, parts, ["samples"], EXACT) == found
