"""Which layers a stage has, and with which values they are built."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy
import pytest
import torch
from torch import nn

from hf_zero.core.units.marks import whole_shape
from hf_zero.deepspeed.pipe.building import Layer, LayerSpec, TiedLayerSpec, build_layers, name_of, require_layers, without_values
from hf_zero.deepspeed.pipe.module import stage_borders
from hf_zero.deepspeed.served.helpers import set_random_seed
from hf_zero.errors import ConfigError

pytestmark = pytest.mark.quick

NAMES = ["Embedding", "Block", "Block", "Block", "Block", "LayerNorm", "Head"]
SIZES = [90, 10, 10, 10, 10, 1, 89]


@pytest.mark.parametrize(
    ("method", "stages", "borders"),
    [
        ("uniform", 2, [0, 4, 7]),
        ("uniform", 7, list(range(8))),
        ("parameters", 2, [0, 3, 7]),
        ("parameters", 3, [0, 1, 6, 7]),
        ("type:block", 2, [0, 3, 7]),
        ("type:BLOCK|head", 5, None),
        ("Parameters", 1, [0, 7]),
    ],
)
def test_borders_of_stages(method: str, stages: int, borders: list[int] | None) -> None:
    found = stage_borders(method, SIZES, NAMES, stages)
    assert found[0] == 0 and found[-1] == 7 and all(start < stop for start, stop in zip(found, found[1:], strict=False))
    weights = {"uniform": [1] * 7, "parameters": SIZES}.get(method.lower(), [int(name in ("Block", "Head")) for name in NAMES])
    heaviest = max(sum(weights[start:stop]) for start, stop in zip(found, found[1:], strict=False))
    if borders is not None:
        assert heaviest == max(sum(weights[start:stop]) for start, stop in zip(borders, borders[1:], strict=False))
    else:
        assert heaviest == 1


def test_equal_numbers_of_layers_leave_the_rest_to_the_first_stages() -> None:
    assert stage_borders("uniform", SIZES, NAMES, 2) == [0, 4, 7]
    assert stage_borders("uniform", SIZES, NAMES, 4) == [0, 2, 4, 6, 7]


@pytest.mark.parametrize(
    ("method", "stages", "text"),
    [
        ("uniform", 8, "7 layer.s. over 8 stages.*set num_stages to 7 or less"),
        ("profile", 2, "'uniform', 'parameters' or 'type:REGEX'"),
        ("type:", 2, "'uniform', 'parameters' or 'type:REGEX'"),
        ("type:Attention", 2, "matches no layer; there are Embedding, Block, LayerNorm, Head"),
        ("type:(", 2, "is not a regular expression"),
    ],
)
def test_what_gives_no_borders_is_an_error(method: str, stages: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        stage_borders(method, SIZES, NAMES, stages)


class Noisy(nn.Module):
    """A layer whose constructor draws from all generators, and reads what it has drawn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * random.random() + float(numpy.random.rand()))
        self.scale = float(self.weight.detach().sum())


def layers() -> list[Layer]:
    return [
        TiedLayerSpec("embed", nn.Embedding, 7, 4),
        LayerSpec(nn.Linear, 4, 4),
        torch.tanh,
        LayerSpec(Noisy, 4),
        LayerSpec(nn.Linear, 4, 4, bias=False),
        TiedLayerSpec("embed", nn.Embedding, 7, 4, forward_fn=lambda layer, inputs: inputs @ layer.weight.T),
    ]


def build(wanted: Sequence[bool], seeded: bool) -> list[nn.Module | None]:
    specs = layers()
    return build_layers(
        specs, [without_values(layer) for layer in specs], wanted, (lambda place: set_random_seed(7 + place)) if seeded else None
    )


@pytest.mark.parametrize("seeded", [False, True])
def test_values_do_not_depend_on_the_stage_that_builds_them(seeded: bool) -> None:
    set_random_seed(3)
    whole, after = build([True] * 6, seeded), torch.rand(3)
    for wanted in ([True, True, False, False, False, False], [False, False, True, True, True, True]):
        set_random_seed(3)
        part = build(wanted, seeded)
        assert torch.equal(torch.rand(3), after)
        assert part[0] is part[5] and part[2] is None
        for place, (mine, all_) in enumerate(zip(part, whole, strict=True)):
            if mine is None or all_ is None:
                continue
            here = wanted[place] or place in (0, 5)
            for name, param in mine.named_parameters():
                wanted_value = all_.get_parameter(name)
                assert torch.equal(param, wanted_value) if here else param.numel() == 0 and whole_shape(param) == wanted_value.shape


def test_each_seed_is_its_layer_s_own() -> None:
    built = build([True] * 6, True)
    set_random_seed(7 + 4)
    assert torch.equal(built[4].weight, nn.Linear(4, 4, bias=False).weight)  # type: ignore[union-attr]


def test_names_are_those_of_classes_and_functions() -> None:
    assert [name_of(layer) for layer in [*layers(), nn.ReLU()]] == ["Embedding", "Linear", "tanh", "Noisy", "Linear", "Embedding", "ReLU"]
    assert repr(LayerSpec(nn.Linear, 4, 2, bias=False)) == "Linear(4, 2, bias=False)"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LayerSpec(torch.tanh), "pass a class of torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: require_layers([]), "at least one layer"),
        (lambda: require_layers([nn.ReLU(), 3]), "layer 1 is 3"),
        (lambda: require_layers([nn.ReLU]), "layer 0 is <class"),
        (lambda: require_layers([TiedLayerSpec("a", nn.Linear, 2, 2), TiedLayerSpec("a", nn.Embedding, 2, 2)]), "Layers with one key"),
        (lambda: without_values(TiedLayerSpec("a", nn.Linear, 2, 2, tied_weight_attr="wte")), "'wte' is not a parameter.*weight, bias"),
    ],
)
def test_what_is_no_layer_is_an_error(make, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()
