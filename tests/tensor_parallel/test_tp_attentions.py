"""A split model returns no attention probabilities of a part of its heads; a model without a known call says what it lacks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.pipeline.partition import make_plan
from hf_zero.tensor_parallel.skeleton import example_inputs
from tests.support import parity, ranks
from tests.support.parity import Run
from tests.support.sequences import Data, build, llama


def refuses() -> None:
    model = build(partial(llama, implementation="eager"))
    engine = parity.initialize(model, Run(1, extra={"tensor_parallel": {"autotp_size": 2}}))
    batch = Data().batch(0)
    for further in ({}, {"return_dict": False}):
        with pytest.raises(UnsupportedError, match="output_attentions=True returns the probabilities of . of . heads on each of 2 ranks"):
            engine(**batch, output_attentions=True, **further)
    assert engine(**batch).attentions is None


def test_attentions_of_some_heads_are_refused() -> None:
    ranks.run_ranks(refuses, 2)


class Pictures(nn.Module):
    config: Any = SimpleNamespace()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return pixel_values


class Fails(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such call")


def test_messages_name_what_is_missing_and_ways_that_exist() -> None:
    with pytest.raises(ConfigError, match="Pictures.forward takes pixel_values, and its config has no image_size"):
        example_inputs(Pictures())
    with pytest.raises(ConfigError, match="hf_zero calls it with input_ids of two samples. Give forward a branch") as caught:
        make_plan(Fails(), 2, "uniform")
    assert "inputs=" not in str(caught.value)
