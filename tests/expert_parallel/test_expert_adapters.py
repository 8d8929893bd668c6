"""LoRA on experts that are divided over ranks: training, checkpoints, and files in peft's layout, each against plain PyTorch and peft."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.utils import iter_full_params
from tests.support import parity, ranks, zoo
from tests.support.experts import build, build_listed, check_experts, lopsided, mixed, with_adapters, with_experts
from tests.support.parity import Run, Trace, check_bitwise, check_training

MIXTRAL, GPT_OSS = "MixtralForCausalLM", "GptOssForCausalLM"
WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BOTH = {"target_modules": ["q_proj", "v_proj"], "target_parameters": WEIGHTS}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters_of_stacked_experts(every: bool) -> None:
    ranks.run_ranks(check_stacked, 2, every)


def check_stacked(every: bool) -> None:
    """Weights both ways round, biases, all tokens at one rank's experts, one expert on a rank."""
    traces = [_check(MIXTRAL, Run(stage, accumulation=2, clip=0.1), **BOTH) for stage in (1, 3)]
    check_bitwise(traces[1], traces[0], "LoRA on experts: stage 3 against 1")
    only_experts = partial(_check, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    only_experts(MIXTRAL, Run(2), feed=lopsided(MIXTRAL))
    _check(GPT_OSS, Run(3), target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj_bias"])
    few = {"num_local_experts": 2}
    only_experts(MIXTRAL, Run(3, dtype="bf16"), changes=few)
    if every:
        _check(MIXTRAL, Run(0, accumulation=2, clip=0.1), **BOTH)
        _check(GPT_OSS, Run(1), changes=few, **BOTH)


def _check(name: str, run: Run, size: int = 2, feed: Any = None, changes: Any = None, **targets: Any) -> Trace:
    return check_experts(name, run, size, feed, changes, prepare=lambda model: with_adapters(model, **targets))


@pytest.mark.slow
def test_four_ranks() -> None:
    ranks.run_ranks(check_four, 4)


def check_four() -> None:
    for stage in (0, 1, 2, 3):
        _check(MIXTRAL, Run(stage, clip=0.1), 2, **BOTH)
        _check(MIXTRAL, Run(stage, accumulation=2), 4, **BOTH)
    _check(GPT_OSS, Run(3), 4, **BOTH)


@pytest.mark.slow  # `test_adapters_of_stacked_experts` trains the same adapters
def test_adapters_of_experts_in_a_list() -> None:
    ranks.run_ranks(check_listed, 2)


def check_listed() -> None:
    forward = lambda model, batch: model(**batch)  # noqa: E731
    for stage in (1, 3):
        make = lambda: with_adapters(build_listed(), target_modules=["w1", "w2", "w3"])  # noqa: E731
        check_training(make, mixed(MIXTRAL), forward, with_experts(Run(stage, clip=0.1), 2), label="LoRA on a list of experts")


@pytest.mark.slow  # fast: `test_adapters_of_stacked_experts`
def test_files_of_peft(tmp_path: Path) -> None:
    build(MIXTRAL).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    ranks.run_ranks(check_files, 2, str(tmp_path))


def check_files(folder: str) -> None:
    """Adapters around a model of which a rank has read its share: those of the whole model; saved, peft loads them; merged, they agree."""
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    for stage in (2, 3):
        config = with_experts(Run(stage), 2).config()
        holder = HfDeepSpeedConfig(config)
        model = with_adapters(type(build(MIXTRAL)).from_pretrained(f"{folder}/base"), **BOTH)
        unset_hf_deepspeed_config()
        trained = [param for param in model.parameters() if param.requires_grad]
        engine = hf_zero.initialize(model=model, config=config, model_parameters=trained)[0]
        fresh = engine._consolidated_16bit_state_dict()
        wanted = with_adapters(build(MIXTRAL), **BOTH).state_dict()
        assert fresh is None or all(torch.equal(value, wanted[name]) for name, value in fresh.items())
        parity.micro_step(engine, mixed(MIXTRAL)(0, 0, ranks.rank()), zoo.loss, 0)
        whole = engine._consolidated_16bit_state_dict()
        place = f"{folder}/adapters{stage}"
        model.save_pretrained(place, state_dict=whole, is_main_process=ranks.rank() == 0)
        merged = {name: value.clone() for name, value in iter_full_params(engine)}
        if ranks.rank() == 0:
            alone = PeftModel.from_pretrained(build(MIXTRAL), place)
            saved = {f"{name.removesuffix('.weight')}.default.weight": value for name, value in get_peft_model_state_dict(alone).items()}
            assert any("experts" in name for name in saved) and all(torch.equal(value, whole[name]) for name, value in saved.items())
            assert any(not torch.equal(value, wanted[name]) for name, value in saved.items() if "experts" in name)
            _check_merged(alone, merged)
        engine.destroy()
        del holder


def _check_merged(alone: Any, merged: dict[str, torch.Tensor]) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    plain = alone.merge_and_unload()
    expected = revert_weight_conversion(plain, plain.state_dict())
    assert merged.keys() <= expected.keys() and any("experts" in name for name in merged)
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_adapters_that_cannot_be_divided() -> None:
    ranks.run_ranks(check_refusals, 2)


class OtherAdapter(nn.Module):
    """Around a parameter of experts, and no LoRA."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.parameter_name = inner, "down_proj"


def check_refusals() -> None:
    model = build(MIXTRAL)
    model.model.layers[0].mlp.experts = OtherAdapter(model.model.layers[0].mlp.experts)
    with pytest.raises(UnsupportedError, match="carry an adapter .OtherAdapter. that computes with all of them"):
        parity.initialize(model, with_experts(Run(1), 2))
    model = build(MIXTRAL)
    parity.initialize(model, with_experts(Run(1), 2)).destroy()
    with pytest.raises(StateError, match="it was created when this rank held only its own experts. Add adapters before initialize"):
        parity.initialize(with_adapters(model, **BOTH), with_experts(Run(1), 2))
