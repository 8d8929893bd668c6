"""Test nested containers: names of tensors and their replacement have one order, and every container keeps its class."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutput

from hf_zero.system.trees import convert_inside, map_tensors, tensors_in

Pair = namedtuple("Pair", "left right")


class Rows(list[Any]):
    """A list that pytree treats as a leaf."""


def nest() -> dict[str, Any]:
    """Return seven tensors, numbered in the order in which they are found, in every kind of container."""
    numbered = iter(torch.arange(7.0).unbind())
    return {
        "z": [next(numbered), None, "text"],
        "a": Pair(next(numbered), (next(numbered), 3)),
        "output": CausalLMOutput(loss=next(numbered), logits=next(numbered)),
        "rows": Rows([OrderedDict(inner=next(numbered))]),
        "cache": DynamicCache(),
        "last": next(numbered),
    }


def test_tensors_have_their_keys_in_the_order_of_the_containers() -> None:
    found = list(tensors_in(nest()))
    assert [key for key, _ in found] == ["z.0", "a.0", "a.1.0", "output.loss", "output.logits", "rows.0.inner", "last"]
    assert [int(tensor) for _, tensor in found] == list(range(7))
    assert [key for key, _ in tensors_in(torch.ones(1), "batch")] == ["batch"]


def test_tensors_are_replaced_in_the_same_order_and_the_rest_stays() -> None:
    seen: list[int] = []
    given = nest()
    made = map_tensors(given, lambda tensor: seen.append(int(tensor)) or tensor + 10)
    assert seen == list(range(7)) and [int(tensor) for _, tensor in tensors_in(made)] == list(range(10, 17))
    assert list(made) == list(given) and made["z"][1:] == [None, "text"] and made["a"].right[1] == 3
    for name in ("z", "a", "output", "rows", "cache"):
        assert type(made[name]) is type(given[name])
    assert made["cache"] is given["cache"] and made["output"].loss is not None and type(made["rows"][0]) is OrderedDict


def test_one_tensor_is_converted_by_its_key() -> None:
    given = nest()
    for key, tensor in list(tensors_in(given)):
        made = convert_inside(nest(), key, 10, torch.add)
        values = dict(tensors_in(made))
        assert int(values.pop(key)) == int(tensor) + 10
        assert all(int(value) == int(dict(tensors_in(given))[name]) for name, value in values.items())
    assert convert_inside(given, "no.such", 10, torch.add) is given
