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


class ByLayer:
    """Configuration whose layers differ: reading their common number of heads is an error, as in transformers 5.24."""

    def __init__(self, config: Any) -> None:
        self.whole, self.per_layer_config = config, {0: config}

    def __getattr__(self, name: str) -> Any:
        if name == "num_attention_heads":
            raise RuntimeError("'num_attention_heads' is a per-layer attribute")
        if "whole" not in self.__dict__:  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.whole, name)


def refuses(by_layer: bool) -> None:
    model = build(partial(llama, implementation="eager"))
    if by_layer:
        model.config = ByLayer(model.config)
    engine = parity.initialize(model, Run(1, extra={"tensor_parallel": {"autotp_size": 2}}))
    batch = Data().batch(0)
    for further in ({}, {"return_dict": False}):
        with pytest.raises(UnsupportedError, match="output_attentions=True returns the probabilities of . of . heads on each of 2 ranks"):
            engine(**batch, output_attentions=True, **further)
    assert engine(**batch).attentions is None


@pytest.mark.parametrize("by_layer", [False, True])
def test_attentions_of_some_heads_are_refused(by_layer: bool) -> None:
    ranks.run_ranks(refuses, 2, by_layer)


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
