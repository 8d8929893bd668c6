"""Test that a model that is sharded while it is built has the weights of a plain build, and leaves the random generators in its state."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import DTYPES, Run, initialize
from tests.support.versions import TRANSFORMERS_5
from tests.support.zero3 import transformers_zero3, whole_parameters

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**SIZE, "vocab_size": 64}
PICTURE = {**SIZE, "image_size": 16, "patch_size": 8}
CODER = {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "pad_token_id": 1} | {
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip
SOUND = {**TEXT, "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2} | {
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
# Class, configuration, arguments: initializers of many kinds, models in models, tied and parametrized weights, random constructors.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
    "llama_bf16": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, "dtype": "bfloat16"}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}),
    "bart": ("BartForConditionalGeneration", "BartConfig", CODER),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**TEXT, "num_key_value_heads": 2, "num_local_experts": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", TEXT),
    "deberta_v2": ("DebertaV2ForSequenceClassification", "DebertaV2Config", {**TEXT, "relative_attention": True}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND),
    "distilbert": (
        "DistilBertModel", "DistilBertConfig",
        {"vocab_size": 64, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "sinusoidal_pos_embds": True},
    ),
    "clip": ("CLIPModel", "CLIPConfig", {"text_config": TEXT, "vision_config": PICTURE, "projection_dim": 8}),
    "beit": ("BeitForImageClassification", "BeitConfig", {**PICTURE, "use_mask_token": True}),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**TEXT, "head_dim": 8, "num_key_value_heads": 2}),
}  # fmt: skip


# transformers 4 draws missing embeddings again for the tied head, and numbers of the constructor of wav2vec2.
OTHERWISE_IN_4 = ("gpt2", "mamba", "gemma2", "wav2vec2")


def _model(name: str) -> tuple[Any, Any]:
    import transformers

    kind, config, arguments = MODELS[name]
    return getattr(transformers, kind), getattr(transformers, config)(**copy.deepcopy(arguments))


def _models(dtype: str) -> list[str]:
    return list(MODELS) if dtype == "fp32" else ["llama", "bart", "deberta_v2", "wav2vec2"]


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _drawn() -> tuple[Any, ...]:
    """Return a number from each generator, which shows the position of its stream."""
    return float(torch.rand(())), random.random(), float(numpy.random.random())


def _require_same(label: str, model: nn.Module, plain: nn.Module, after: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    assert after == wanted, f"{label}: the generators have gone on to {after}, plain to {wanted}"
    params, buffers = dict(plain.named_parameters()), dict(plain.named_buffers())
    for name, value in whole_parameters(model).items():
        assert torch.equal(value, params[name].detach().to(value.dtype)), f"{label}: {name}"
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name].to(buffer.dtype)), f"{label}: buffer {name}"


def _from_config(dtype: str) -> None:
    for name in _models(dtype):
        kind, config = _model(name)
        _seed()
        plain = kind._from_config(copy.deepcopy(config))
        wanted = _drawn()
        with transformers_zero3(Run(3, dtype=dtype)):
            _seed()
            model = kind._from_config(config)
            after = _drawn()
        assert all(param.shape == torch.Size([0]) for key, param in model.named_parameters() if "parametrizations" not in key), name
        assert not any({"apply", "smart_apply"} & module.__dict__.keys() for module in model.modules())
        _require_same(name, model, plain, after, wanted)


def _missing(names: list[str]) -> set[str]:
    """Return every third weight of a file, except weights that no initializer of transformers sets, with stage 3 or without."""
    left_out = ("expert", "parametriz", "num_batches", "logit_scale")
    return set([name for name in sorted(names) if not any(part in name for part in left_out)][::3])


def _from_pretrained(dtype: str, folder: str) -> None:
    from safetensors.torch import load_file, save_file

    for name in _models(dtype):
        if not TRANSFORMERS_5 and name in OTHERWISE_IN_4:
            continue
        kind, config = _model(name)
        path = Path(folder, name)
        if ranks.rank() == 0:
            kind(config).save_pretrained(path)
            weights = load_file(path / "model.safetensors")
            kept = {key: value for key, value in weights.items() if key not in _missing(list(weights))}
            save_file(kept, path / "model.safetensors", {"format": "pt"})
        dist.barrier()
        _seed()
        plain = kind.from_pretrained(path)
        wanted = _drawn()
        with transformers_zero3(Run(3, dtype=dtype)):
            _seed()
            model = kind.from_pretrained(path)
            after = _drawn()
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())), name
        if ranks.rank() == 0:
            _require_same(name, model, plain, after, wanted)
        else:  # parametrized weights are rank 0's at initialize
            whole_parameters(model)
            assert after == wanted, name


class _Drawing(nn.Module):
    """A model that draws in every way that constructors do, before and after its layers are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.convolution = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3))
        self.embedding, self.attention = nn.Embedding(32, 16, padding_idx=1), nn.MultiheadAttention(16, 2)
        self.lstm = nn.LSTM(8, 8)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16), 2, enable_nested_tensor=False)
        self.list = nn.ParameterList([nn.Parameter(torch.randn(5)), nn.Parameter(torch.rand(3, 3))])
        self.scale = nn.Parameter(torch.Tensor(4).uniform_())
        self.register_buffer("table", torch.randn(7))
        nn.init.trunc_normal_(self.first.weight, std=0.02)
        nn.init.orthogonal_(self.second.weight)
        nn.init.kaiming_normal_(self.third.weight, mode="fan_out")
        nn.init.sparse_(self.second.weight, 0.5)
        self.first.weight.data.normal_(0.0, 0.3)
        with torch.no_grad():
            self.third.weight.div_(math.sqrt(6.0))  # of fp32 values, also where the run is in 16 bit
            self.first.bias.copy_(torch.randn(self.first.bias.shape, device=self.first.bias.device, dtype=self.first.bias.dtype))
        self.second.bias = nn.Parameter(torch.rand_like(self.third.bias))
        self.apply(_init_weights)
        self.tied = nn.Linear(16, 32, bias=False)
        self.tied.weight = self.embedding.weight
        self.head = nn.Linear(16, 4)
        for param in self.attention.parameters():
            if param.dim() > 1:
                nn.init.xavier_uniform_(param, gain=0.7)


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.uniform_(module.bias)
    elif isinstance(module, nn.TransformerEncoderLayer):  # of its children
        nn.init.xavier_normal_(module.linear1.weight)
        module.linear2.weight.data.mul_(0.7)


def _hand_written(dtype: str) -> None:
    import hf_zero

    _seed()
    plain = _Drawing()
    wanted = _drawn()
    _seed()
    with hf_zero.zero.Init(config_dict_or_path=Run(3, dtype=dtype).config()):
        model = _Drawing()
    after = _drawn()
    types = {param.dtype for name, param in model.named_parameters() if "parametrizations" not in name}
    assert types == {DTYPES[dtype]}
    _require_same("hand-written", model, plain, after, wanted)
    if dtype == "fp32":  # each rank draws from its own seed, and rank 0's values are everybody's
        torch.manual_seed(ranks.rank())
        with hf_zero.zero.Init(config_dict_or_path=Run(3).config()):
            model = _Drawing()
        after = torch.rand(())
        torch.manual_seed(ranks.rank())
        own = _Drawing()
        assert torch.equal(after, torch.rand(())), "of this rank's own seed"
        if ranks.rank() == 0:
            wanted_values: dict[str, Tensor] = dict(own.named_parameters())
        weights = whole_parameters(model)
        if ranks.rank() == 0:
            assert all(torch.equal(value, wanted_values[name]) for name, value in weights.items())


def _initialize_draws_nothing() -> None:
    for stage in range(4):
        model = CASES["gpt2"].build()
        _seed()
        engine = initialize(model, Run(stage, dtype="bf16"))
        after = _drawn()
        engine.destroy()
        _seed()
        assert after == _drawn(), f"stage {stage}"


@pytest.mark.fast_rows("bf16")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_from_config_at_stage_3_draws_what_a_plain_build_draws(dtype: str) -> None:
    ranks.run_ranks(_from_config, 2, dtype)


@pytest.mark.fast_rows("bf16")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_missing_weights_are_drawn_as_in_a_plain_load(dtype: str, tmp_path: Path) -> None:
    ranks.run_ranks(_from_pretrained, 2, dtype, str(tmp_path), env={"HF_ZERO_ALLOW_MISSING_WEIGHTS": "1"})


@pytest.mark.fast_rows("fp32")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_constructors_that_draw_in_every_way(dtype: str) -> None:
    ranks.run_ranks(_hand_written, 2, dtype)


def test_initialize_draws_no_random_numbers() -> None:
    ranks.run_ranks(_initialize_draws_nothing, 2)
