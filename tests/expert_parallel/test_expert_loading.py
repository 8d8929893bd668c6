"""``from_pretrained`` under expert parallelism: a rank reads its own experts, whatever the stage and however the files hold them."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError
from tests.support import ranks, zoo
from tests.support.experts import build
from tests.support.parity import Run
from tests.support.reads import Reads, loaded_under, saved_sizes

ONE_BY_ONE, STACKED, LISTED = "MixtralForCausalLM", "GptOssForCausalLM", "NllbMoeForConditionalGeneration"


def _saved(folder: Path, name: str) -> Reads:
    return saved_sizes(build(name), folder)


@pytest.mark.fast_rows("GptOssForCausalLM", "MixtralForCausalLM")
@pytest.mark.parametrize("name", [ONE_BY_ONE, STACKED, LISTED])
def test_a_rank_reads_its_own_experts_alone(tmp_path: Path, name: str) -> None:
    sizes = _saved(tmp_path, name)
    experts = {key for key in sizes if re.search(r"experts\.(expert_)?\d+\.|experts\.(gate_up|down)_proj", key)}
    assert experts
    ranks.run_ranks(check_reads, 2, name, str(tmp_path), sizes, experts)


@pytest.mark.slow
def test_two_groups_of_ranks_read_the_same(tmp_path: Path) -> None:
    sizes = _saved(tmp_path, ONE_BY_ONE)
    ranks.run_ranks(check_reads, 4, ONE_BY_ONE, str(tmp_path), sizes, {key for key in sizes if ".experts." in key})


def check_reads(name: str, folder: str, sizes: dict[str, int], experts: set[str]) -> None:
    rest = {key: size for key, size in sizes.items() if key not in experts}
    for stage in (2, 3):
        config = {**Run(stage).config(), "expert_parallel": {"enabled": True, "autoep_size": 2}}
        model, reads = _load(name, folder, config)
        own = {key: size for key, size in reads.items() if key in experts}
        assert 2 * sum(own.values()) == sum(sizes[key] for key in experts), own
        if name != STACKED:  # other tensors than the other rank, none of them twice
            assert own == {key: sizes[key] for key in own}
        dense = {key: size for key, size in reads.items() if key not in experts}
        assert dense == (rest if stage < 3 or ranks.rank() == 0 else {})
        _check_engine(name, model, config)


def _load(name: str, folder: str | None, settings: dict[str, Any], **arguments: Any) -> tuple[Any, Reads]:
    return loaded_under(settings, type(build(name)), folder, **arguments)


def _check_engine(name: str, model: nn.Module, config: dict[str, Any]) -> None:
    """What was loaded is the saved model; before there is an engine it refuses to be called or saved."""
    batch = zoo.batch(name, torch.Generator().manual_seed(ranks.rank()))
    for early in (model, copy.deepcopy(model)) if config["zero_optimization"]["stage"] < 3 else ():
        with pytest.raises(StateError, match="has loaded only its own experts"):
            zoo.loss(early, batch)
    with pytest.raises(StateError, match="this rank's state dict has no values"):
        next(value for key, value in model.state_dict().items() if "experts" in key).numpy()
    if config["zero_optimization"]["stage"] < 3:
        model = copy.deepcopy(model)  # whose parameters are other objects
    engine = hf_zero.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    wanted = build(name)
    assert torch.allclose(zoo.loss(engine, batch), zoo.loss(wanted.train(), batch), rtol=1e-5)
    whole = engine._consolidated_16bit_state_dict()
    if ranks.rank() == 0:
        expected = wanted.state_dict()
        assert whole.keys() == expected.keys() and all(torch.equal(value, expected[key]) for key, value in whole.items())
    engine.destroy()


def test_experts_that_were_loaded_for_other_ranks_are_refused(tmp_path: Path) -> None:
    _saved(tmp_path, ONE_BY_ONE)
    ranks.run_ranks(check_other_ranks, 2, str(tmp_path))


def check_other_ranks(folder: str) -> None:
    config = {**Run(1).config(), "expert_parallel": {"enabled": True, "autoep_size": 2}}
    model, _ = _load(ONE_BY_ONE, folder, config)
    loaded = r"layers.0.mlp.experts was loaded with the experts of rank . of 2, but here experts are not divided: set .* to 2"
    with pytest.raises(StateError, match=loaded):
        hf_zero.initialize(model=model, config=Run(1).config(), model_parameters=model.parameters())
    if ranks.rank() == 0:
        model = build(ONE_BY_ONE)
    with pytest.raises(StateError, match="call from_pretrained on every rank"):
        hf_zero.initialize(model=model, config=config, model_parameters=model.parameters())


def test_what_else_is_loaded_under_the_configuration_is_whole(tmp_path: Path) -> None:
    of_dense = _saved(tmp_path / "dense", "LlamaForCausalLM")
    ranks.run_ranks(check_whole, 2, str(tmp_path), of_dense)


def check_whole(folder: str, of_dense: dict[str, int]) -> None:
    """A model without experts, and one of 4 experts whose values are handed over: read as ever, the second divided by the engine."""
    config = {**Run(2).config(), "expert_parallel": {"enabled": True, "autoep_size": 2}}
    dense, reads = _load("LlamaForCausalLM", f"{folder}/dense", config)
    assert reads == of_dense
    assert all(torch.equal(value, build("LlamaForCausalLM").state_dict()[key]) for key, value in dense.state_dict().items())
    values = build(ONE_BY_ONE).state_dict()
    model, reads = _load(ONE_BY_ONE, None, config, config=build(ONE_BY_ONE).config, state_dict=values)
    assert reads == {} and model.model.layers[0].mlp.experts.down_proj.shape[0] == 4
    hf_zero.initialize(model=model, config=config, model_parameters=model.parameters())[0].destroy()
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] == 2
