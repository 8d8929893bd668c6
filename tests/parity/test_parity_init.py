"""Test zero.Init, GatheredParameters and the safe accessors: parameters that are sharded from construction on, read and written
unsharded.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_zero.errors import StateError
from tests.support import ranks
from tests.support.models import CASES, Batch, ModelCase, class_loss
from tests.support.parity import DTYPES, Run, check, initialize, micro_step, reference, train
from tests.support.rows import slow_but, thinned
from tests.support.zero3 import transformers_zero3, whole_parameters

STAGES = (0, 1, 2, 3)
MLP = CASES["mlp"]
MODELS = ("gpt2", "llama", "t5", "bart", "albert", "mixtral", "deberta_v2", "vit")


def check_from_here(model: nn.Module, case: ModelCase, run: Run, label: str) -> None:
    """Train a model whose parameters are shards already; the reference starts from the same weights."""
    start = whole_parameters(model)
    engine = initialize(model, run)
    trace = train(engine, case.rows, case.forward, run)
    engine.destroy()
    if ranks.rank() == 0:
        plain = case.build()
        plain.load_state_dict(start, strict=False)
        if hasattr(plain, "tie_weights"):
            plain.tie_weights()
        check(trace, lambda follow=None: reference(copy.deepcopy(plain), case.rows, case.forward, run, ranks.world(), follow), run, label)


# ------------------------------------------------------------------------------------------------ construction


def _init_then_train(run: Run, name: str) -> None:
    import hf_zero

    case = CASES[name]
    with hf_zero.zero.Init(config_dict_or_path=run.config()):
        model = case.build()
    plain = case.build()
    for (name_, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, nn.Parameter) and parameter.shape == torch.Size([0]), f"{name_} is whole: {tuple(parameter.shape)}"
        assert (parameter.ds_shape, parameter.ds_numel) == (wanted.shape, wanted.numel()), name_
        assert parameter.dtype == DTYPES[run.dtype], f"{name_}: {parameter.dtype}"
    for name_, value in whole_parameters(model).items():
        assert torch.equal(value, dict(plain.named_parameters())[name_].to(value.dtype)), f"{name_} differs from a plain build"
    check_from_here(model, case, run, f"zero.Init {name}")


def _ranks_build_different_weights(run: Run) -> None:
    """Build other weights on each rank: rank 0's values are used, from construction on."""
    import hf_zero

    with hf_zero.zero.Init(config_dict_or_path=run.config()):
        model = MLP.build(seed=ranks.rank())
    wanted = dict(MLP.build(seed=0).named_parameters())
    assert all(torch.equal(value, wanted[name].to(value.dtype)) for name, value in whole_parameters(model).items())


def _from_config(run: Run, name: str) -> None:
    """Call transformers' ``_from_config`` under HfDeepSpeedConfig, for every architecture."""
    case = CASES[name]
    plain = case.build()
    with transformers_zero3(run):
        torch.manual_seed(0)
        model = type(plain)._from_config(copy.deepcopy(plain.config)).train()
        assert all(parameter.shape == torch.Size([0]) for parameter in model.parameters())
    check_from_here(model, case, run, f"from_config {name}")


def _initial_values(name: str) -> None:
    """Check that the values are those of the model's own initialisation, whatever the seeds of the other ranks."""
    plain = CASES[name].build()
    torch.manual_seed(0)
    wanted = dict(type(plain)._from_config(copy.deepcopy(plain.config)).named_parameters())
    with transformers_zero3(Run(3)):
        torch.manual_seed(ranks.rank())
        model = type(plain)._from_config(copy.deepcopy(plain.config))
    assert not any({"apply", "smart_apply"} & module.__dict__.keys() for module in model.modules())
    for label, value in whole_parameters(model).items():
        assert torch.equal(value, wanted[label]), label


def _from_pretrained(run: Run, name: str, folder: str) -> None:
    """Check that loading into shards gives exactly the file's values."""
    case = CASES[name]
    plain = case.build()
    if ranks.rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    with transformers_zero3(run):
        model = type(plain).from_pretrained(folder, dtype=DTYPES[run.dtype]).train()
    wanted = dict(plain.named_parameters())
    for key, value in whole_parameters(model).items():
        assert torch.equal(value, wanted[key].to(value.dtype)), f"{key} differs from the file"
    check_from_here(model, case, run, f"from_pretrained {name}")


def _speech_and_others(name: str) -> None:
    """Build and train models that gather a parameter inside the gather of its module while they build (real DeepSpeed fails on these)."""
    kind, config, batch_of = _speech_and_others_parts(name)
    run = Run(stage=3)
    with transformers_zero3(run):
        torch.manual_seed(0)
        model = kind._from_config(copy.deepcopy(config)).train()
    whole = [key for key, parameter in model.named_parameters() if parameter.shape != torch.Size([0])]
    assert all("parametrizations" in key for key in whole), f"not sharded: {whole}"

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return kind(copy.deepcopy(config)).train()

    def forward(network: nn.Module, batch: Batch) -> Tensor:
        return network(**batch)[0].float().pow(2).mean()

    case = ModelCase(name, plain, lambda generator, rows: batch_of(generator, rows), forward)
    check_from_here(model, case, run, name)


def _speech_and_others_parts(name: str) -> tuple[Any, Any, Callable[[torch.Generator, int], Batch]]:
    """Return class, tiny config without dropout or masking, and inputs of a model."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    nothing_random = {
        f"{key}_dropout": 0.0 for key in ("hidden", "attention", "activation", "feat_proj")
    } | {"layerdrop": 0.0, "mask_time_prob": 0.0, "mask_feature_prob": 0.0}  # fmt: skip
    convolutions = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2}
    speech = {**sizes, **nothing_random, **convolutions, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    sound = lambda generator, rows: {"input_values": torch.randn(rows, 160, generator=generator)}  # noqa: E731
    series = lambda generator, rows: {"past_values": torch.randn(rows, 16, 1, generator=generator)}  # noqa: E731
    parts: dict[str, Any] = {
        "wav2vec2": lambda: (transformers.Wav2Vec2Model, transformers.Wav2Vec2Config(**speech), sound),
        "hubert": lambda: (transformers.HubertModel, transformers.HubertConfig(**speech), sound),
        "sew": lambda: (transformers.SEWModel, transformers.SEWConfig(**speech, squeeze_factor=2), sound),
        "patchtst": lambda: (
            transformers.PatchTSTModel,
            transformers.PatchTSTConfig(
                d_model=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, context_length=16, patch_length=4,
                norm_type="layernorm",
                attention_dropout=0.0, ff_dropout=0.0, positional_dropout=0.0, path_dropout=0.0, do_mask_input=False,
            ),
            series,
        ),
        "distilbert": lambda: (
            transformers.DistilBertModel,
            transformers.DistilBertConfig(
                vocab_size=64, dim=16, n_layers=2, n_heads=2, hidden_dim=32, sinusoidal_pos_embds=True, dropout=0.0, attention_dropout=0.0
            ),
            lambda generator, rows: {"input_ids": torch.randint(3, 64, (rows, 8), generator=generator)},
        ),
    }  # fmt: skip
    return parts[name]()


def _adapters_on_shards(run: Run) -> None:
    """Add ordinary parameters to a sharded model (PEFT, resized embeddings), and pass the mixture to initialize."""
    import hf_zero

    def add_adapter(model: nn.Module) -> nn.Module:
        model.requires_grad_(False)
        torch.manual_seed(1)
        model.head = nn.Linear(16, 4)
        return model

    with hf_zero.zero.Init(config_dict_or_path=run.config()):
        model = MLP.build()
    engine = initialize(add_adapter(model), run)
    trace = train(engine, MLP.rows, class_loss, run)
    engine.destroy()
    if ranks.rank() == 0:
        check(
            trace,
            lambda follow=None: reference(add_adapter(MLP.build()), MLP.rows, class_loss, run, ranks.world(), follow),
            run,
            "adapter on shards",
        )


def _arange_keeps_its_dtype(dtype: str) -> None:
    """Check that integer and explicitly typed tensors made inside Init are not cast (rotary tables, position ids)."""
    import hf_zero

    with hf_zero.zero.Init(config_dict_or_path=Run(stage=3, dtype=dtype).config()):
        assert torch.arange(4).dtype == torch.int64
        assert torch.zeros(2, dtype=torch.float64).dtype == torch.float64
        layer = nn.Linear(4, 4)
    assert layer.weight.dtype == DTYPES[dtype]
    assert torch.zeros(2).dtype == torch.float32
    assert nn.Linear(2, 2).weight.shape == (2, 2)


def _disabled(stage: int) -> None:
    import hf_zero

    with hf_zero.zero.Init(config_dict_or_path=Run(stage=3).config(), enabled=False):
        assert nn.Linear(4, 3).weight.shape == (3, 4)
    with pytest.raises(RuntimeError, match="in the body"), hf_zero.zero.Init(config_dict_or_path=Run(stage=3).config()):
        raise RuntimeError("in the body")
    assert nn.Linear(4, 3).weight.shape == (3, 4)


class _Lazy(nn.Module):
    """Model whose last layer gets its shape by a forward, inside the constructor or after it."""

    def __init__(self, runs: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.LazyLinear(2)
        if runs:
            self.last(torch.ones(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x))
        return result


def _lazy_modules(config: dict[str, Any]) -> None:
    import hf_zero

    torch.manual_seed(1)
    plain = _Lazy(True)
    torch.manual_seed(1)
    with hf_zero.zero.Init(config_dict_or_path=config):
        model = _Lazy(True)
    assert all(parameter.shape == torch.Size([0]) for parameter in model.parameters())
    for (name, value), wanted in zip(whole_parameters(model).items(), plain.parameters(), strict=True):
        assert torch.equal(value, wanted), name
    with hf_zero.zero.Init(config_dict_or_path=config):
        late = _Lazy(False)
    with pytest.raises(StateError, match=r"last.weight, last.bias has no shape before the first forward"):
        hf_zero.initialize(model=late, config=config)


# ------------------------------------------------------------------------------------------------ GatheredParameters


def _lenient(stage: int) -> None:
    """Pass None, generators, single tensors, ordinary and detached tensors, buffers, duplicates, empty lists; nest; disable."""
    import hf_zero

    gathered = hf_zero.zero.GatheredParameters
    model = initialize(MLP.build(), Run(stage=stage)).module
    weight, shape = model.blocks[0].up.weight, (32, 16)
    ordinary, buffer = nn.Parameter(torch.ones(3)), torch.ones(2)
    whole = stage < 3
    inputs: list[Any] = [
        weight, [weight, weight], [None, weight], (parameter for parameter in model.parameters()), model.parameters(),
        [weight, ordinary, buffer], {"key": weight}.values(),
    ]  # fmt: skip
    for argument in inputs:
        with gathered(argument):
            assert weight.shape == shape
        assert (weight.shape == shape) == whole
    for harmless in (
        [],
        None,
        [None],
        ordinary,
        buffer,
        list(model.state_dict().values()),
        [parameter.detach() for parameter in model.parameters()],
    ):
        with gathered(harmless, modifier_rank=0):
            pass
    with gathered(weight), gathered([weight, model.head.weight]):
        assert weight.shape == shape and model.head.weight.shape == (4, 16)
    with gathered(weight, enabled=False):
        assert (weight.shape == shape) == whole
    with gathered(weight, fwd_module=model.blocks[1]):
        assert weight.shape == shape
    with pytest.raises(ValueError, match="in the body"), gathered(weight):
        raise ValueError("in the body")
    assert (weight.shape == shape) == whole


def _modifier_rank_before_initialize(run: Run) -> None:
    import hf_zero

    with hf_zero.zero.Init(config_dict_or_path=run.config()):
        model = MLP.build()
    with hf_zero.zero.GatheredParameters(list(model.blocks[0].parameters()), modifier_rank=0):
        if ranks.rank() == 0:
            nn.init.constant_(model.blocks[0].up.weight, 0.25)
    with hf_zero.zero.GatheredParameters([model.blocks[1].up.weight]):  # alike on all ranks
        model.blocks[1].up.weight.data.fill_(0.5)
    weights = whole_parameters(model)
    assert bool((weights["blocks.0.up.weight"] == 0.25).all())
    assert bool((weights["blocks.1.up.weight"] == 0.5).all())
    check_from_here(model, MLP, run, "modified before initialize")


def _modifier_rank_after_initialize(run: Run) -> None:
    """Check that a change after initialize reaches the forward and the master, and that training continues from it."""
    import hf_zero

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.blocks[0].up.weight.fill_(0.25)
            model.head.bias.copy_(torch.arange(4.0))

    model = MLP.build()
    engine = initialize(model, run)
    chosen = [model.blocks[0].up.weight, model.head.bias]
    with hf_zero.zero.GatheredParameters(chosen, modifier_rank=1):
        if ranks.rank() == 1:
            change(model)
    trace = train(engine, MLP.rows, class_loss, run)
    engine.destroy()
    if ranks.rank() == 0:
        plain = MLP.build()
        change(plain)
        check(
            trace,
            lambda follow=None: reference(copy.deepcopy(plain), MLP.rows, class_loss, run, ranks.world(), follow),
            run,
            "modified after initialize",
        )


def _deep_copy_inside_a_gather(stage: int) -> None:
    """Copy as PEFT's modules_to_save does: the copy has ordinary complete parameters that outlive the gather."""
    import hf_zero

    engine = initialize(MLP.build(), Run(stage=stage))
    head = engine.module.head
    with hf_zero.zero.GatheredParameters(head.parameters()):
        twin = copy.deepcopy(head)
    assert twin.weight.shape == (4, 16) and torch.equal(twin.weight, MLP.build().head.weight)
    twin(torch.randn(2, 16)).sum().backward()
    assert twin.weight.grad is not None
    assert not hasattr(twin.weight, "ds_status") or stage < 3
    engine.destroy()


# ------------------------------------------------------------------------------------------------ accessors


def _full_values_against_plain(run: Run) -> None:
    """Compare fp32 weight, gradient and moments of every parameter, complete, with plain PyTorch."""
    from hf_zero.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

    plain = MLP.build()
    settings = {"lr": run.lr, "betas": (0.9, 0.99), "eps": run.eps, "weight_decay": run.weight_decay}
    optimizer = torch.optim.AdamW(plain.parameters(), **settings)
    engine = initialize(MLP.build(), run)
    pairs = list(zip(engine.module.named_parameters(), plain.parameters(), strict=True))
    for step in range(2):
        for rank in range(ranks.world()):
            (class_loss(plain, MLP.rows(step, 0, rank)) / ranks.world()).backward()
        loss = class_loss(engine, MLP.rows(step, 0, ranks.rank()))
        engine.backward(loss)
        for (name, parameter), wanted in pairs:
            torch.testing.assert_close(
                safe_get_full_grad(parameter), wanted.grad, rtol=1e-4, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        for (_, parameter), wanted in pairs:
            torch.testing.assert_close(safe_get_full_fp32_param(parameter), wanted.detach(), rtol=1e-4, atol=1e-7)
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(
                    safe_get_full_optimizer_state(parameter, key), optimizer.state[wanted][key], rtol=1e-4, atol=1e-9
                )
    engine.destroy()


def _set_full_values(run: Run) -> None:
    """Check that training continues from the values that safe_set_* writes."""
    from hf_zero.utils import safe_get_full_optimizer_state, safe_set_full_fp32_param, safe_set_full_optimizer_state

    engine = initialize(MLP.build(), run)
    parameter = engine.module.blocks[1].up.weight
    micro_step(engine, {**MLP.rows(0, 0, ranks.rank()), **_inputs(run, 0)}, class_loss, 0)
    value = torch.full((32, 16), 0.125)
    safe_set_full_fp32_param(parameter, value)
    safe_set_full_optimizer_state(parameter, value * 0.01, "exp_avg")
    assert torch.equal(safe_get_full_optimizer_state(parameter, "exp_avg"), value * 0.01)
    weights = whole_parameters(engine.module)
    assert torch.equal(weights["blocks.1.up.weight"].float(), value)
    assert bool((weights["blocks.1.down.weight"].float() != 0.125).any())
    micro_step(engine, {**MLP.rows(1, 0, ranks.rank()), **_inputs(run, 1)}, class_loss, 0)
    moved = whole_parameters(engine.module)["blocks.1.up.weight"].float() - value
    assert 0 < moved.abs().max() < 0.1, "the step did not start from the value that was set"
    engine.destroy()


def _inputs(run: Run, step: int) -> dict[str, Tensor]:
    return {"inputs": MLP.rows(step, 0, ranks.rank())["inputs"].to(DTYPES[run.dtype])}


def _every_parameter_has_deepspeed_attributes() -> None:
    """Check the attributes that peft, trl and Lightning read from every parameter of a stage-3 model without a test for them."""
    engine = initialize(MLP.build(), Run(stage=3))
    for parameter in engine.module.parameters():
        assert isinstance(parameter.ds_numel, int) and isinstance(parameter.ds_shape, torch.Size)
        assert parameter.ds_shape.numel() == parameter.ds_numel
        parameter.ds_active_sub_modules.clear()
        assert parameter.ds_status is not None and parameter.ds_id is not None
        assert parameter.partition_numel() <= parameter.ds_numel
        assert parameter.data.shape == torch.Size([0])
    engine.destroy()


@pytest.mark.fast_rows("tied_coder-bf16", "odd_mlp-fp32")
@thinned("mlp", name=["mlp", "conv", "tied_coder", "odd_mlp"], dtype=["fp32", "bf16"])
def test_zero_init(name: str, dtype: str) -> None:
    ranks.run_ranks(_init_then_train, 3, Run(stage=3, dtype=dtype, accumulation=2), name)


def test_zero_init_takes_the_weights_of_rank_zero() -> None:
    ranks.run_ranks(_ranks_build_different_weights, 3, Run(stage=3))


@pytest.mark.fast_rows("gpt2")
@pytest.mark.parametrize("name", ["gpt2", "t5", "bart"])
def test_transformers_initialises_a_sharded_model_as_a_plain_one(name: str) -> None:
    """Check gpt2 and t5, which initialise weights of a module's children, and bart, which writes to a row of its embedding."""
    ranks.run_ranks(_initial_values, 2, name)


@pytest.mark.fast_rows("mixtral")
@pytest.mark.parametrize("name", slow_but(MODELS, "t5", "mixtral", "deberta_v2"))
def test_transformers_from_config_under_zero3(name: str) -> None:
    ranks.run_ranks(_from_config, 2, Run(stage=3, dtype="bf16", accumulation=2), name)


@pytest.mark.fast_rows("gpt2")
@pytest.mark.parametrize("name", slow_but(MODELS[:6], "gpt2", "mixtral"))
def test_transformers_from_pretrained_under_zero3(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks.run_ranks(_from_pretrained, 2, Run(stage=3, dtype="fp32"), name, folder)


@pytest.mark.fast_rows("wav2vec2")
@pytest.mark.parametrize("name", slow_but(["wav2vec2", "hubert", "sew", "patchtst", "distilbert"], "wav2vec2", "patchtst", "distilbert"))
def test_models_that_gather_while_they_build(name: str) -> None:
    if name == "distilbert" and metadata.version("transformers").startswith("4."):
        pytest.skip("transformers 4 freezes its position embeddings on rank 0 alone")
    ranks.run_ranks(_speech_and_others, 2, name)


def test_ordinary_parameters_on_a_model_of_shards() -> None:
    ranks.run_ranks(_adapters_on_shards, 2, Run(stage=3, accumulation=2))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tensors_made_inside_init_keep_their_dtype(dtype: str) -> None:
    ranks.run_ranks(_arange_keeps_its_dtype, 2, dtype)


def test_lazy_modules_inside_init() -> None:
    ranks.run_ranks(_lazy_modules, 2, Run(stage=3).config())


def test_disabled_init_and_errors_inside_it() -> None:
    ranks.run_ranks(_disabled, 2, 3)


@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_gathered_parameters_is_lenient(stage: int) -> None:
    ranks.run_ranks(_lenient, 2, stage)


@pytest.mark.fast_rows("fp32")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_modifier_rank_before_initialize(dtype: str) -> None:
    ranks.run_ranks(_modifier_rank_before_initialize, 2, Run(stage=3, dtype=dtype))


@pytest.mark.fast_rows("3-bf16", "0-fp32")
@thinned(stage=STAGES, dtype=["fp32", "bf16"])
def test_modifier_rank_after_initialize(stage: int, dtype: str) -> None:
    ranks.run_ranks(_modifier_rank_after_initialize, 2, Run(stage=stage, dtype=dtype))


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_deep_copy_inside_a_gather(stage: int) -> None:
    ranks.run_ranks(_deep_copy_inside_a_gather, 2, stage)


@pytest.mark.fast_rows("3-3", "0-1")
@thinned(stage=STAGES, world_size=[1, 3])
def test_full_values_equal_plain_pytorch(stage: int, world_size: int) -> None:
    ranks.run_ranks(_full_values_against_plain, world_size, Run(stage=stage))


@pytest.mark.fast_rows("3-bf16", "0-fp32")
@thinned(stage=STAGES, dtype=["fp32", "bf16"])
def test_values_can_be_set_whole(stage: int, dtype: str) -> None:
    ranks.run_ranks(_set_full_values, 2, Run(stage=stage, dtype=dtype))


def test_parameters_carry_deepspeeds_attributes() -> None:
    ranks.run_ranks(_every_parameter_has_deepspeed_attributes, 2)
