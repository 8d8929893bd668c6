"""Test layers that torchao has converted to float8: the numbers of one plain process, at every stage, by accelerate's flags as well.

torchao's emulation runs on CPUs. The gather of weights as float8 is tested without torchao too.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from hf_zero import observe
from hf_zero.comm.quantized import Float8Codes
from hf_zero.core.units.marks import mark_float8
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from tests.support import ranks, trainers
from tests.support.models import CASES, VOCAB, Batch
from tests.support.parity import DTYPES, Masters, Run, Trace, check, check_bitwise, collect, initialize, reference, train

STAGES = (0, 1, 2, 3)
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
E4M3 = torch.float8_e4m3fn


def feed(step: int, micro: int, rank: int) -> Batch:
    return CASES["llama"].rows(step, micro, rank)


def forward(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def plain(lora: bool = False, checkpointing: bool = False) -> nn.Module:
    """Return a Llama, the same on every rank, with adapters on a frozen base if asked."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=False, use_cache=False, **SIZE))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=16, init_lora_weights=False, target_modules="all-linear"))
    return model.train()


def recipe(gathers: bool, name: str = "tensorwise") -> Any:
    """Return torchao's configuration of a recipe; ``gathers`` is the flag by which FSDP2 gathers float8."""
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=True, enable_fsdp_float8_all_gather=gathers)


def converted(gathers: bool, name: str = "tensorwise", **kind: bool) -> nn.Module:
    """Return the model after torchao's own conversion of its projections."""
    from torchao.float8 import convert_to_float8_training

    model = plain(**kind)
    convert_to_float8_training(model, config=recipe(gathers, name), module_filter_fn=lambda _, path: "proj" in path and "lora" not in path)
    return model


def _against_plain(runs: list[Run], gathers: bool, name: str, **kind: bool) -> None:
    for run in runs:

        def expected(follow: Masters | None = None, run: Run = run) -> Trace:
            return reference(converted(False, name, **kind), feed, forward, run, ranks.world(), follow)

        engine = initialize(converted(gathers, name, **kind), run)
        trace = train(engine, feed, forward, run)
        engine.destroy()
        if ranks.rank() == 0:
            check(trace, expected, run, f"float8 {name} {kind}")


def _as_scripts_do(folder: Path) -> None:
    """Check stage 3 with gathers of float8 beside 16-bit gathers: every bit, half of the bytes, and what scripts do between steps."""
    saves = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
    run = Run(3, "bf16", accumulation=2, clip=0.1, extra=saves)
    found: list[tuple[Trace, list[float], list[tuple[str, int]]]] = []
    for gathers in (True, False):
        engine = initialize(converted(gathers, checkpointing=True), run)
        sent = _bytes_of_gathers(engine, "model.layers.1")
        between: list[float] = []
        trace = train(engine, feed, forward, run)
        sent = list(sent)
        engine.eval()
        with torch.no_grad():
            between.append(forward(engine, feed(7, 0, ranks.rank())).item())
        engine.train()
        engine.save_16bit_model(str(folder / str(gathers)))
        engine.save_checkpoint(str(folder / f"{gathers} states"))
        engine.destroy()
        engine = initialize(converted(gathers), run)
        engine.load_checkpoint(str(folder / f"{gathers} states"))
        with hf_zero.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            for name, param in engine.module.named_parameters():
                if "down_proj" in name:
                    param.data.mul_(1.5)  # its largest element and with it the scale change
        between += train(engine, feed, forward, dataclasses.replace(run, steps=1)).losses
        trace.weights = collect(engine, Trace()).weights
        found.append((trace, between, sent))
        engine.destroy()
    (ours, evaluated, packed), (theirs, expected, whole) = found
    check_bitwise(ours, theirs)
    assert evaluated == expected
    sizes = dict(reversed(packed))  # later gathers are those of a script, with exact values
    assert packed.count(("model.layers.1 [float8 bfloat16]", sizes["model.layers.1 [float8 bfloat16]"])) == 8  # forwards and backwards
    assert 2 * sizes["model.layers.1 [float8 bfloat16]"] + sizes["model.layers.1 [bfloat16]"] == whole[0][1], (packed, whole)
    weights = [_saved(folder / str(gathers)) for gathers in (True, False)]
    assert weights[0].keys() == weights[1].keys() == dict(plain().named_parameters()).keys()
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def _saved(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def _bytes_of_gathers(engine: Any, block: str) -> list[tuple[str, int]]:
    """Return a list to which each all-gather of the units of ``block`` adds its unit and the bytes of one rank."""
    sent: list[tuple[str, int]] = []
    original = engine.collectives.all_gather

    def all_gather(full: Tensor, shard: Tensor, unit: str) -> Any:
        if unit.startswith(block):
            sent.append((unit, shard.nbytes))
        return original(full, shard, unit)

    engine.collectives.all_gather = all_gather
    return sent


# ------------------------------------------------------------------------------------------------ accelerate


def accelerated(make: Callable[[bool, bool], Any], stage: int, source: Path | None, lora: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train as a script with accelerate does; return this rank's losses, the last with the model in evaluation mode, and the weights."""
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs
    from torch.utils.data import DataLoader

    accelerator: Accelerator = make(stage, AORecipeKwargs(config=recipe(gathers=True)))
    if source is not None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)  # divided while it is loaded at stage 3
    else:
        model = plain(lora)
    rows = torch.randint(0, VOCAB, (24, 8), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    assert accelerator.mixed_precision == "fp8"
    assert sum(type(module).__name__ == "Float8Linear" for module in engine.module.modules()) >= 13  # without the first and the last
    losses = []
    for batch in loader:
        with accelerator.accumulate(engine):
            loss = engine(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(engine.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        losses.append(engine(input_ids=rows[:2], labels=rows[:2]).loss.item())
    state = accelerator.get_state_dict(engine)
    if stage == 3:
        assert any("float8" in unit.name for unit in engine.units)
    engine.destroy()
    return losses, {name: value.clone() for name, value in (state or {}).items()}


def _plugin(kind: str, stage: int, handler: Any) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin

    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero}
    if kind == "stock":
        plugin: Any = DeepSpeedPlugin(hf_ds_config=config)
        return Accelerator(mixed_precision="fp8", gradient_accumulation_steps=2, kwargs_handlers=[handler], deepspeed_plugin=plugin)
    plugin = hf_zero.ZeroPlugin(config, mixed_precision="fp8")
    return Accelerator(gradient_accumulation_steps=2, kwargs_handlers=[handler], deepspeed_plugin=plugin)


def _by_flags(cases: list[tuple[str, int, bool, bool]], folder: Path) -> None:
    if ranks.rank() == 0:
        plain().save_pretrained(folder)
    torch.distributed.barrier()
    found: dict[bool, list[Any]] = {False: [], True: []}
    for kind, stage, lora, loaded in cases:
        with trainers.clean_state():
            found[lora].append(accelerated(partial(_plugin, kind), stage, folder if loaded else None, lora))
    for results in found.values():
        for losses, state in results[1:]:
            assert losses == results[0][0]
            assert all(torch.equal(value, results[0][1][name]) for name, value in state.items())


def _together(folder: Path) -> None:
    _against_plain([Run(stage, "bf16", accumulation=2, clip=0.1) for stage in (1, 3)], True, "tensorwise")
    _against_plain([Run(3, "bf16")], True, "tensorwise", lora=True, checkpointing=True)
    _as_scripts_do(folder)
    _by_flags([("stock", 2, False, True), ("zero", 3, False, True)], folder / "base")
    with pytest.raises(UnsupportedError, match=r"q_proj is a Float8Linear.*without tensor_parallel.autotp_size"):
        initialize(converted(False), Run(0, extra={"tensor_parallel": {"autotp_size": 2}}))


def test_float8_layers(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    ranks.run_ranks(_together, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes_at_every_stage(name: str) -> None:
    pytest.importorskip("torchao")
    runs = [Run(stage, dtype, accumulation=2, clip=0.1) for stage in STAGES for dtype in DTYPES]
    ranks.run_ranks(_against_plain, 2, runs, name == "tensorwise", name)


@pytest.mark.slow
def test_flags_at_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    cases = [(kind, stage, lora, not lora) for kind in ("stock", "zero") for stage in STAGES for lora in (False, True)]
    ranks.run_ranks(_by_flags, 2, cases, tmp_path)


# ------------------------------------------------------------------------------------------------ without torchao


def _codes(gathers: bool, dtype: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the weights that forwards of a small model read at stage 3, and those that a script gathers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 7), nn.Tanh(), nn.Linear(7, 1))
    reads: list[Tensor] = []
    for layer in (model[0], model[2]):
        with torch.no_grad():
            layer.weight[0, 0] *= 7
        if gathers:
            mark_float8(layer.weight, E4M3)
        layer.register_forward_pre_hook(lambda module, _: reads.append(module.weight.detach().clone()))
    engine = initialize(model, Run(3, dtype))
    for step in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step)
            engine.backward(engine(torch.randn(3, 24, dtype=DTYPES[dtype])).square().mean())
        engine.step()
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine.destroy()
    return reads, whole


def _one_scale_for_a_weight() -> None:
    for dtype in DTYPES:
        reads, whole = _codes(True, dtype)
        wanted, _ = _codes(False, dtype)
        assert len(reads) == 4 and [value.dtype for value in whole.values()] == [DTYPES[dtype]] * 4
        for value, exact in zip(reads[:2], wanted[:2], strict=True):  # the first forward; later weights are those of other gradients
            largest = exact.abs().max()
            scale = (448 / largest.double()).float()
            codes = (exact.float() * scale).clamp(-448, 448).to(E4M3)
            assert torch.equal(torch.where(codes.float().abs() == 448, largest, codes.float() / scale).abs().to(exact.dtype), value.abs())
            assert value.abs().max() == largest and torch.equal(value.sign(), codes.float().sign().to(value.dtype))
            assert torch.equal((value.float() * scale).to(E4M3).float(), codes.float()), "cast again, the values have the same codes"
            assert not torch.equal(value, exact)
        read = [value.float() for value in reads[2:]]
        assert all((value - whole[name].float()).abs().max() > 0 for value, name in zip(read, ("0.weight", "2.weight"), strict=True))


def _reads_of_a_script() -> tuple[list[Tensor], list[list[str]], str]:
    """Return what forwards read while a script writes weights, the labels of each step, and the error of a write that no vote follows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Linear(24, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    model.forward = lambda x: model[3](torch.tanh(model[2](torch.tanh(model[1](x)))))  # type: ignore[method-assign]
    reads: list[Tensor] = []
    writes = [False]

    def look(module: Any, _: Any) -> None:
        with torch.no_grad():
            if writes[0]:
                module.weight[0, 0] += 5.0  # in a part of one rank
        reads.append(module.weight.detach().clone())

    for layer in model[1:]:
        mark_float8(layer.weight, E4M3)
        layer.register_forward_pre_hook(look)
    zero = {"stage3_max_reuse_distance": 0, "leaf_module": {"names": ["1", "2"]}}
    engine = initialize(model, Run(3, "bf16", accumulation=2, extra={"zero_optimization": zero}))
    labels = []
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    params = list(model.parameters())

    def train_step() -> None:
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()

    for step in range(5):
        writes[0] = step == 2
        with observe.record_labels() as found:
            train_step()
        labels.append(found)
        if step == 3:
            with torch.no_grad(), hf_zero.zero.GatheredParameters(params):
                params[0].data.view(-1)[:1].fill_(9.0)
            engine.eval()
            engine(x)
            with torch.no_grad(), hf_zero.zero.GatheredParameters(params, modifier_rank=1):
                params[2].data.view(-1)[-1:].fill_(-7.0)
            engine(x)
            hf_zero.utils.safe_set_full_fp32_param(params[4], torch.full((1, 8), 3.0))
            engine(x)
            engine.train()
    writes[0] = True
    for _ in range(2):  # alone, so no vote of the ranks is between the write and the next gather
        model[2](torch.ones(1, 8, dtype=torch.bfloat16))
    writes[0] = False
    error = ""
    try:
        train_step()
    except StateError as refused:
        error = str(refused)
    engine.destroy()
    return reads, labels, error


def _scales_of_a_step() -> None:
    reads, labels, error = _reads_of_a_script()
    with pytest.MonkeyPatch.context() as patch:  # compare the scales in each gather
        kept = Float8Codes.all_gather
        patch.setattr(Float8Codes, "agreed", False)
        patch.setattr(Float8Codes, "all_gather", lambda codes, *rest: (codes.forget(), kept(codes, *rest))[1])
        wanted, every, silent = _reads_of_a_script()
    assert len(reads) == len(wanted) and all(map(torch.equal, reads[:-8], wanted[:-8]))
    compared = [
        [sum("float8" in label and label.startswith("hf_zero::all_reduce") for label in step) for step in one] for one in (labels, every)
    ]
    assert compared[0][1::3] == [1, 1], "one comparison of all units after the update"
    assert compared[1][1] >= 12, "one for each gather"
    assert "written while a part of the model ran alone" in error and not silent


def test_weights_gathered_as_float8() -> None:
    ranks.run_ranks(_one_scale_for_a_weight, 2)
    ranks.run_ranks(_scales_of_a_step, 2)


# ------------------------------------------------------------------------------------------------ what is refused


def _refusals() -> None:
    engine = types.new_class("Linear", (nn.Linear,))
    engine.__module__ = "transformer_engine.pytorch.module.linear"
    with pytest.raises(UnsupportedError, match=r"0 is a Linear of Transformer Engine.*fp8_backend AO"):
        initialize(nn.Sequential(engine(4, 4)), Run(1))


def test_transformer_engine_is_refused() -> None:
    ranks.run_ranks(_refusals, 1)


def test_a_plugin_for_fp8_and_an_accelerator_for_another_precision() -> None:
    plugin = hf_zero.ZeroPlugin(stage=3, mixed_precision="fp8")
    assert plugin.deepspeed_config["bf16"] == {"enabled": True} and plugin.asks_for == "fp8"
    plugin.set_mixed_precision("fp8")
    with pytest.raises(ConfigError, match=r"mixed_precision is 'fp8', and the Accelerator's is 'bf16'"):
        plugin.set_mixed_precision("bf16")
