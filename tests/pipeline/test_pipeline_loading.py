"""``from_pretrained`` under a pipeline: a rank reads the layers of its own stages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

import hf_zero
from hf_zero.errors import StateError
from tests.pipeline import breadth as pp_breadth
from tests.pipeline.pipelines import with_stages
from tests.support import ranks, zoo
from tests.support.parity import Run
from tests.support.reads import Reads, loaded_under, saved_sizes

OTHERS = ("MixtralForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_rank_reads_its_own_stage_alone(name: str, tmp_path: Path) -> None:
    ranks.run_ranks(check_reads, 2, name, str(tmp_path), saved_sizes(pp_breadth.build(name, 4), tmp_path), 1)


@pytest.mark.slow
def test_each_rank_of_a_layer_reads_the_stage(tmp_path: Path) -> None:
    sizes = saved_sizes(pp_breadth.build("LlamaForCausalLM", 4), tmp_path)
    ranks.run_ranks(check_reads, 4, "LlamaForCausalLM", str(tmp_path), sizes, 2)


def check_reads(name: str, folder: str, whole: Reads, tp: int) -> None:
    config = with_stages(Run(1), 2, tp).config()
    model, reads = loaded_under(config, type(pp_breadth.build(name, 4)), folder)
    everyone = _gathered(reads)
    assert all(whole[key] == size for key, size in reads.items())
    assert set().union(*everyone) == whole.keys()  # together everything
    both = sum(whole[key] for key in set(everyone[0]) & set(everyone[-1]))
    assert both <= sum(size for key, size in whole.items() if "embed" in key or "shared" in key or "wte" in key), name
    _check_engine(name, model, config)


def _gathered(reads: Reads) -> list[Reads]:
    everyone: list[Any] = [None] * ranks.world()
    dist.all_gather_object(everyone, reads)
    return everyone


def _check_engine(name: str, model: nn.Module, config: dict[str, Any]) -> None:
    """What was loaded is the saved model; before there is an engine it refuses to be called or saved."""
    batch = zoo.batch(name, torch.Generator().manual_seed(0))
    for early in (model, copy.deepcopy(model)):
        with pytest.raises(StateError, match="has loaded only the layers of its own stage"):
            zoo.loss(early, batch)
    other = next(key for key, param in model.named_parameters() if param.dim() > 1 and not any(param.stride()))
    with pytest.raises(StateError, match="this rank's state dict has no values"):
        model.state_dict()[other].numpy()
    model = copy.deepcopy(model)  # whose parameters are other objects
    engine = hf_zero.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    wanted = pp_breadth.build(name, 4)
    assert torch.allclose(zoo.loss(engine.eval(), batch), zoo.loss(wanted.eval(), batch), rtol=1e-5)
    whole = engine._consolidated_16bit_state_dict()
    if ranks.rank() == 0:
        expected = wanted.state_dict()
        assert whole.keys() == expected.keys() and all(torch.equal(value, expected[key]) for key, value in whole.items())
    engine.destroy()


@pytest.mark.slow  # fast: `test_a_rank_reads_its_own_stage_alone`
def test_embeddings_are_resized_after_the_load(tmp_path: Path) -> None:
    for tied in (False, True):
        config = pp_breadth.build("LlamaForCausalLM", 4).config
        config.tie_word_embeddings = tied
        saved_sizes(LlamaForCausalLM(config), tmp_path / str(tied))
    ranks.run_ranks(check_resized, 2, str(tmp_path))


def check_resized(folder: str) -> None:
    """Each stage resizes what it has; tied weights get one stage's new rows."""
    config = with_stages(Run(1), 2).config()
    for tied in ("False", "True"):
        plain = LlamaForCausalLM.from_pretrained(f"{folder}/{tied}").state_dict()
        model, _ = loaded_under(config, LlamaForCausalLM, f"{folder}/{tied}")
        rows = model.config.vocab_size
        model.resize_token_embeddings(rows + 8)
        engine = hf_zero.initialize(model=model, config=config, model_parameters=model.parameters())[0]
        assert torch.isfinite(zoo.loss(engine, zoo.batch("LlamaForCausalLM", torch.Generator().manual_seed(0))))
        whole = engine._consolidated_16bit_state_dict()
        engine.destroy()
        for name, value in whole.items() if whole is not None else ():
            resized = name in ("model.embed_tokens.weight", "lm_head.weight")
            assert len(value) == len(plain[name]) + 8 * resized, name
            assert torch.equal(value[: len(plain[name])], plain[name]), name
            assert torch.isfinite(value).all(), name


def test_a_distributed_config_and_adapters(tmp_path: Path) -> None:
    saved_sizes(pp_breadth.build("LlamaForCausalLM", 4), tmp_path)
    ranks.run_ranks(check_noted, 2, str(tmp_path))


def check_noted(folder: str) -> None:
    """``DistributedConfig(pp_size)`` says it, adapters come in between; an engine that the load was not for is refused."""
    from peft import LoraConfig, get_peft_model

    plain, config = Run(1).config(), with_stages(Run(1), 2).config()
    kind = type(pp_breadth.build("LlamaForCausalLM", 4))
    model, _ = loaded_under(plain, kind, folder, distributed_config={"pp_size": 2})
    held = [name for name, param in model.named_parameters() if any(param.stride())]
    assert 0 < len(held) < len(list(model.parameters()))
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "gate_proj"]))
    engine = hf_zero.initialize(model=model, config=config, model_parameters=[p for p in model.parameters() if p.requires_grad])[0]
    batch = zoo.batch("LlamaForCausalLM", torch.Generator().manual_seed(0))
    wanted = zoo.loss(pp_breadth.build("LlamaForCausalLM", 4).eval(), batch)
    assert torch.allclose(zoo.loss(engine.eval(), batch), wanted, rtol=1e-5)  # adapters begin with nothing
    engine.destroy()
    model, _ = loaded_under(config, kind, folder)
    with pytest.raises(StateError, match="loaded for a pipeline, and this engine has none"):
        hf_zero.initialize(model=model, config=plain, model_parameters=model.parameters())
    if ranks.rank() == 0:
        model = pp_breadth.build("LlamaForCausalLM", 4)
    with pytest.raises(StateError, match="Call from_pretrained on every rank"):
        hf_zero.initialize(model=model, config=config, model_parameters=model.parameters())
