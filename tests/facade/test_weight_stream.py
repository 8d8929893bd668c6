"""``iter_full_params``: every weight whole, under its Hugging Face name, a bounded part of the model at a time."""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import hf_zero
from hf_zero.core.units.layout import UnitState
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.utils import iter_full_params
from tests.facade import streams
from tests.support import ranks


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(7)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=50, n_positions=16))


def _mixtral() -> MixtralForCausalLM:
    torch.manual_seed(7)
    return MixtralForCausalLM(MixtralConfig(vocab_size=50, num_local_experts=4, **streams.LLAMA))


def _all_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _follows_training() -> None:
    for stage, dtype in ((0, None), (2, None), (3, None), (3, torch.bfloat16)):
        engine = streams.engine_of(_gpt2(), stage)
        for _ in range(2):
            streams.train(engine)
            expected = {name: hf_zero.utils.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
            wanted = {name: value.to(dtype) if dtype else value for name, value in expected.items()}
            whole = [unit for unit in engine.units if unit.state is UnitState.UNSHARDED]
            held = []
            found = {}
            for name, value in iter_full_params(engine, bucket_bytes=1, dtype=dtype):
                found[name] = value  # kept: lets go of nothing that is still read
                held.append(sum(unit.state is not UnitState.SHARDED for unit in engine.units))
            _all_same(found, wanted)
            assert [unit for unit in engine.units if unit.state is UnitState.UNSHARDED] == whole
            # The root, the bucket at hand and the next one.
            assert stage < 3 or ranks.world() == 1 or max(held) <= 3 < len(engine.units)
        engine.destroy()


@pytest.mark.fast_rows("2")
@pytest.mark.parametrize("world", [1, 2])
def test_weights_of_a_model_in_training(world: int) -> None:
    ranks.run_ranks(_follows_training, world)


def _merges() -> None:
    for stage, settings in (
        (0, {}),
        (3, {}),
        (3, {"use_dora": True}),
        (3, {"target_modules": ["embed_tokens", "v_proj"], "use_rslora": True}),
    ):
        model = streams.lora(streams.llama(), **settings)
        merged = copy.deepcopy(model).merge_and_unload()
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        engine = streams.engine_of(model, stage)
        _all_same(dict(iter_full_params(engine, bucket_bytes=4096)), {name: value.detach() for name, value in merged.named_parameters()})
        _all_same(dict(iter_full_params(engine, merge_adapters=False)), before)
        streams.train(engine)  # nothing is left merged
        assert all(not part.merged for part in engine.module.modules() if isinstance(part, peft.tuners.lora.LoraLayer))
        engine.destroy()


def test_adapters_are_merged_layer_by_layer() -> None:
    ranks.run_ranks(_merges, 2)


def _as_files(folder: str) -> None:
    model = _mixtral()
    if ranks.rank() == 0:
        model.save_pretrained(folder)
    engine = streams.engine_of(model, 3)
    found = dict(iter_full_params(engine, bucket_bytes=1 << 14))
    torch.distributed.barrier()
    files = load_file(f"{folder}/model.safetensors")
    assert found.keys() == files.keys() and all(torch.equal(found[name], files[name]) for name in files)


def test_names_and_shapes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """transformers keeps Mixtral's experts stacked in memory and apart in files."""
    ranks.run_ranks(_as_files, 2, str(tmp_path))


def _on_one_rank() -> int:
    engine = streams.engine_of(streams.llama(), 3)
    return sum(1 for _ in iter_full_params(engine, rank0_only=True))


def test_the_first_rank_alone_may_take_them() -> None:
    first, second = ranks.run_ranks(_on_one_rank, 2)
    assert first == len(list(streams.llama().named_parameters())) and second == 0


def _split() -> None:
    expected = {name: value.detach() for name, value in streams.llama().named_parameters()}
    engine = streams.engine_of(streams.llama(), 3, tensor_parallel={"autotp_size": 2})
    _all_same(dict(iter_full_params(engine)), expected)


def _merges_divided(sections: dict[str, dict[str, int]], stage: int) -> None:
    for settings in ({}, {"use_dora": True}, {"r": 2, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]}):
        model = streams.lora(streams.llama(), **settings)
        merged = copy.deepcopy(model).merge_and_unload()
        engine = streams.engine_of(model, stage, **sections)
        found = dict(iter_full_params(engine, bucket_bytes=4096))
        assert list(found) == [name for name, _ in merged.named_parameters()]
        for name, value in merged.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-5, atol=1e-6, msg=name)
        engine.destroy()


@pytest.mark.parametrize(
    ("sections", "stage"), [({"tensor_parallel": {"autotp_size": 2}}, 3), ({"pipeline": {"stages": 2}}, 1)], ids=["tensors", "stages"]
)
def test_adapters_of_divided_layers_are_merged(sections: dict[str, dict[str, int]], stage: int) -> None:
    ranks.run_ranks(_merges_divided, 2, sections, stage)


@pytest.mark.slow  # fast: `test_adapters_are_merged_layer_by_layer`
def test_tensor_parallel_shards_are_joined() -> None:
    ranks.run_ranks(_split, 2)


def _refusals() -> None:
    engine = streams.engine_of(streams.llama(), 3)
    stream = iter_full_params(engine, bucket_bytes=1)
    next(stream)
    streams.train(engine)
    with pytest.raises(StateError, match=r"step\(\) was called before the iteration ended"):
        list(stream)
    assert len(list(iter_full_params(engine))) == len(list(engine.module.parameters()))
    with pytest.raises(ConfigError, match="bucket_bytes is 0"):
        iter_full_params(engine, bucket_bytes=0)
    layers = engine.module.model.layers
    for hooked in (layers[1].register_forward_pre_hook, layers[0].register_forward_hook):  # in a layer, and between two
        handle = hooked(lambda *_: list(iter_full_params(engine)) and None)
        with pytest.raises(StateError, match="a forward or backward is running"):
            streams.train(engine)
        handle.remove()
    engine.destroy()
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedError, match="PROMPT_TUNING: prompts belong to no layer"):
        iter_full_params(streams.engine_of(peft.get_peft_model(streams.llama(), prompts), 2))


def test_what_cannot_be_streamed_is_one_error() -> None:
    ranks.run_ranks(_refusals, 2)
