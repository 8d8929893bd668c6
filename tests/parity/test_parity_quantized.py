"""Test adapters on a base that bitsandbytes has quantized: the numbers of the same QLoRA in one plain process, at every stage."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import INDEX_FILE
from hf_zero.errors import CheckpointError, StateError, UnsupportedError
from hf_zero.utils import iter_full_params
from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.parity import DTYPES, Masters, Run, Trace, check, check_training, full_masters, initialize, reference, train, value_of
from tests.support.rows import slow_but

bitsandbytes = pytest.importorskip("bitsandbytes")

STAGES = (0, 1, 2, 3)
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    # What is recommended for FSDP: the same bytes under the name of another element type.
    "nf4 stored as bf16": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
    "nf4 stored as fp32": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.float32},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama whose layers have several blocks of 64 elements."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("base")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=False, **size)).save_pretrained(folder)
    return folder


def quantized(base: Path, kind: str, checkpointing: bool = False, seed: int = 1) -> nn.Module:
    """Return the base as scripts load it for QLoRA, with adapters, the same on every rank."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(**KINDS[kind]), dtype=torch.float32)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapters = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(model, adapters).train()


def feed(step: int, micro: int, rank: int) -> Batch:
    return CASES["llama"].rows(step, micro, rank)


def forward(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _against_plain(base: Path, kind: str, runs: list[Run]) -> None:
    for run in runs:
        check_training(partial(quantized, base, kind, checkpointing=run.stage % 2 == 1), feed, forward, run, label=kind)


def test_nf4_at_every_stage(base: Path) -> None:
    ranks.run_ranks(_against_plain, 2, base, "nf4", [Run(stage, accumulation=2, clip=0.1) for stage in STAGES])


@pytest.mark.fast_rows("int8")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nf4"])
def test_other_kinds(base: Path, kind: str) -> None:
    ranks.run_ranks(_against_plain, 2, base, kind, [Run(3, accumulation=2, clip=0.1)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_in_sixteen_bit_on_four_ranks(base: Path, kind: str) -> None:
    ranks.run_ranks(_against_plain, 4, base, kind, [Run(stage, "bf16", accumulation=2, clip=0.1) for stage in STAGES])


PLACES: dict[str, dict[str, Any]] = {
    "host": {"offload_param": {"device": "cpu"}},
    "file": {"offload_param": {"device": "nvme"}},
    "shard groups": {"mics_shard_size": 1},
    "secondary copies": {"zero_hpz_partition_size": 2},
    "quantized gathers of the rest": {"zero_quantized_nontrainable_weights": True},
}


def _in_places(base: Path, folder: Path) -> None:
    """Check that the storage of shards and the way they are sent change no bit."""
    wanted = _trained(base, {})
    for place, keys in PLACES.items():
        if "offload_param" in keys:
            keys["offload_param"]["nvme_path"] = str(folder)
        found = _trained(base, keys)
        for name, value in wanted.weights.items():
            assert torch.equal(value, found.weights[name]) or "quantized" in place and value.is_floating_point(), (place, name)


def _trained(base: Path, keys: dict[str, Any]) -> Trace:
    run = Run(3, extra={"zero_optimization": keys})
    engine = initialize(quantized(base, "nf4"), run)
    trace = train(engine, feed, forward, run)
    engine.destroy()
    return trace


@pytest.mark.slow  # fast: `test_nf4_at_every_stage`, `test_each_rank_keeps_its_share`
def test_where_packed_weights_rest(base: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_in_places, 2, base, tmp_path)


def _divided(base: Path, kind: str) -> None:
    """Check that between uses a rank has its share of the bytes, and that reads get the complete weight."""
    plain = quantized(base, kind)
    engine = initialize(quantized(base, kind), Run(3))
    originals = dict(plain.named_parameters())
    packed = {name: param for name, param in engine.module.named_parameters() if not param.requires_grad and "_proj.base" in name}
    assert len(packed) == 14
    held = {id(unit): unit for unit, _ in (param._hf_zero_owner for param in packed.values())}
    scales = {name: originals[name].quant_state.absmax for name in packed if kind != "int8"}
    whole = sum(value_of(originals[name]).nbytes for name in packed) + sum(value.nbytes for value in scales.values())
    assert all(packed[name].quant_state.absmax.numel() == 0 for name in scales)
    state = engine.module.state_dict()
    with pytest.raises(StateError, match="this rank's state dict has no values of it"):
        state[f"{next(iter(packed))}.absmax" if scales else next(iter(packed))].numpy()
    assert whole <= ranks.world() * sum(unit.shard.nbytes for unit in held.values()) <= whole * 1.05
    assert all(param.numel() == 0 and param.untyped_storage().nbytes() == 0 for param in packed.values())
    reads = [layer.state.CB for layer in engine.module.modules() if hasattr(layer, "state")]
    assert len(reads) == (14 if kind == "int8" else 0) and all(value.numel() == 0 for value in reads)
    engine.eval()
    batch = feed(0, 0, ranks.rank())
    with torch.no_grad():  # twice: a forward in eval mode may write a weight in another order, on some CPUs
        outputs = [engine(**batch).logits for _ in range(2)]
    copied = copy.deepcopy(engine.module)
    engine.train()
    with hf_zero.zero.GatheredParameters(list(packed.values())):
        for name, param in packed.items():
            assert torch.equal(value_of(param), value_of(originals[name])), name
            assert name not in scales or torch.equal(param.quant_state.absmax, scales[name]), name
        inside = copy.deepcopy(next(iter(packed.values())))
        assert type(inside) is type(next(iter(packed.values())))
    # In eval mode a plain 4-bit layer may take a kernel of another precision; an 8-bit one turns rounding into whole steps.
    plain.train(kind != "int8")
    with torch.no_grad():
        wanted = plain(**batch).logits
    for output in outputs:
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)
    engine.destroy()
    again = initialize(copied, Run(3))
    again.eval()
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, outputs[0])
    again.destroy()


@pytest.mark.fast_rows("nf4")
@pytest.mark.parametrize("kind", slow_but(["nf4", "fp4", "nf4 stored as bf16", "int8"], "nf4", "int8"))
def test_each_rank_keeps_its_share(base: Path, kind: str) -> None:
    ranks.run_ranks(_divided, 2, base, kind)


# ------------------------------------------------------------------------------------------------ saving


def _save(base: Path, folder: Path, stage: int) -> dict[str, Tensor]:
    """Train, and save a checkpoint without the base, the adapter as peft does, and the complete model's state dict."""
    run = Run(stage)
    engine = initialize(quantized(base, "fp4"), run)
    train(engine, feed, forward, run)
    engine.save_checkpoint(str(folder))
    state = engine._zero3_consolidated_16bit_state_dict() if stage == 3 else engine.module.state_dict()
    if ranks.rank() == 0:
        index = Index.from_json(next(folder.rglob(INDEX_FILE)).read_text(), INDEX_FILE)
        assert {name for name in index.excluded if name.endswith("_proj.base_layer.weight")} == set(index.excluded)
        assert len(index.excluded) == 14
        wanted = quantized(base, "fp4").state_dict()
        assert set(state) == set(wanted)
        for name, value in wanted.items():
            assert "lora" in name or torch.equal(state[name], value), name
        engine.module.save_pretrained(folder / "adapter", state_dict=state)
    masters = full_masters(engine)
    engine.destroy()
    return masters


def _resume(base: Path, folder: Path, stages: tuple[int, ...], masters: dict[str, Tensor]) -> list[float]:
    """Return the adapters that were saved, and the loss of a step on the same batch."""
    losses = []
    for stage in stages:
        engine = initialize(quantized(base, "fp4", seed=5), Run(stage))
        engine.load_checkpoint(str(folder))
        found = full_masters(engine)
        assert all(torch.equal(found[name], value) for name, value in masters.items())
        loss = forward(engine, feed(9, 0, 0))
        engine.backward(loss)
        engine.step()
        losses += [loss.item(), float(engine.get_global_grad_norm())]
        engine.destroy()
    return losses


@pytest.mark.slow
def test_adapters_resume_on_other_ranks_and_load_into_a_plain_model(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    masters = ranks.run_ranks(_save, 2, base, tmp_path, 3)[0]
    numbers = ranks.run_ranks(_resume, 2, base, tmp_path, (0, 3), masters)[0]
    numbers += ranks.run_ranks(_resume, 1, base, tmp_path, (2,), masters)[0]
    assert numbers == pytest.approx(numbers[:2] * 3, rel=1e-5)
    plain = PeftModel.from_pretrained(quantized(base, "fp4").unload(), tmp_path / "adapter")
    saved = {name: param for name, param in plain.named_parameters() if "lora" in name}
    assert len(saved) == len(masters) == 28
    assert all(torch.equal(param, masters[name]) for name, param in saved.items())


# ------------------------------------------------------------------------------------------------ torchao


def _weight_only(base: Path, dtype: torch.dtype) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    quantization = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization, dtype=dtype).requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapters = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(model, adapters).train()


def _torchao(base: Path, folder: Path, run: Run) -> None:
    build = partial(_weight_only, base, DTYPES[run.dtype])
    engine = initialize(build(), run)
    trace = train(engine, feed, forward, run)
    engine.save_checkpoint(str(folder / f"{run.stage}{run.dtype}"))
    engine.load_checkpoint(str(folder / f"{run.stage}{run.dtype}"))
    engine.destroy()

    def expected(follow: Masters | None = None) -> Trace:
        found = reference(build(), feed, forward, run, ranks.world(), follow)
        found.weights = dict(found.masters)  # tensors of torchao's class cannot be compared
        return found

    if ranks.rank() == 0:
        trace.weights = dict(trace.masters)
        check(trace, expected, run, "torchao")


def _torchao_at(base: Path, folder: Path, runs: list[Run]) -> None:
    for run in runs:
        _torchao(base, folder, run)


def test_torchao_at_stage_three(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    ranks.run_ranks(_torchao_at, 2, base, tmp_path, [Run(3, accumulation=2)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torchao_at_every_stage(base: Path, tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("torchao")
    ranks.run_ranks(_torchao_at, 4, base, tmp_path, [Run(stage, dtype, accumulation=2) for stage in STAGES])


class Int4Codes(torch.Tensor):
    """A class with the interface of torchao's classes of 4-bit weights."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Int4Codes:
        made: Int4Codes = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Int4Codes:
        return cls(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].codes) if func is torch.ops.aten.detach.default else NotImplemented


def _refuses_int4() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(Int4Codes(torch.zeros(4, 4, dtype=torch.uint8)), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"1.weight is a Int4Codes.*load_in_4bit=True.*Int8WeightOnlyConfig"):
        initialize(model, Run())


def test_weights_whose_products_have_no_gradient() -> None:
    ranks.run_ranks(_refuses_int4, 1)


def _torchao_divided(base: Path, folder: Path, loaded: bool) -> None:
    """Check that between uses a rank has its share of codes and scales; reads get the complete weight, or one error."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    plain = _weight_only(base, torch.float32)
    originals = {name: param for name, param in plain.named_parameters() if hasattr(param, "qdata")}
    run = Run(3, extra={"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}})
    settings = HfDeepSpeedConfig(run.config()) if loaded else None  # as TrainingArguments make it
    model = _weight_only(base, torch.float32)
    del settings
    assert all(hasattr(model.get_parameter(name), "ds_id") is loaded for name in originals)
    engine = initialize(model, run)
    engine.module.to("cpu")
    found = {name: engine.module.get_parameter(name) for name in originals}
    assert len(found) == 14
    held = {id(unit): unit for unit, _ in (param._hf_zero_owner for param in found.values())}
    whole = sum(value.nbytes for param in originals.values() for value in (param.qdata, param.scale, param.zero_point))
    assert whole <= ranks.world() * sum(unit.shard.nbytes for unit in held.values()) <= whole * 1.05
    for name, param in found.items():
        assert param.qdata.numel() == param.scale.numel() == param.zero_point.numel() == 0
        assert param.ds_status.name == "NOT_AVAILABLE" and param.ds_shape == param.shape == originals[name].shape
    with pytest.raises(StateError, match="this rank's state dict has no values of it"):
        engine.module.state_dict()[next(iter(found))].numpy()
    with pytest.raises(StateError, match="this rank's state dict has no values of it"):
        torch.save(next(iter(found.values())), folder / "parameter.pt")
    copied = copy.deepcopy(engine.module)
    with hf_zero.zero.GatheredParameters(list(found.values())):
        for name, param in found.items():
            assert param.ds_status.name == "AVAILABLE"
            _same_codes(param, originals[name])
        inside = copy.deepcopy(next(iter(found.values())))
    _same_codes(inside, next(iter(originals.values())))
    assert isinstance(inside, nn.Parameter) and not inside.requires_grad
    streamed = dict(iter_full_params(engine, merge_adapters=False))
    for name, original in originals.items():
        _same_codes(streamed[name], original)
    with pytest.raises(UnsupportedError, match="is Int8Tensor: adapters on quantized layers are not merged"):
        dict(iter_full_params(engine))
    with pytest.raises(UnsupportedError, match="is of class Int8Tensor, which safetensors cannot hold"):
        engine.save_16bit_model(str(folder))
    state = engine._zero3_consolidated_16bit_state_dict()
    if ranks.rank() == 0:
        for name, original in originals.items():
            _same_codes(state[name], original)
    batch = feed(0, 0, ranks.rank())
    with torch.no_grad():
        wanted, outputs = plain(**batch).logits, engine(**batch).logits
    assert torch.equal(outputs, wanted)
    engine.destroy()
    again = initialize(copied, Run(3))
    assert all(again.module.get_parameter(name).qdata.numel() == 0 for name in originals)
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, wanted)
    again.destroy()


def _same_codes(found: Any, wanted: Any) -> None:
    assert type(found).__name__ == type(wanted).__name__ == "Int8Tensor"
    for name in ("qdata", "scale", "zero_point"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded divided", "loaded whole"])
def test_each_rank_keeps_its_share_of_torchao_weights(base: Path, tmp_path: Path, loaded: bool) -> None:
    pytest.importorskip("torchao")
    ranks.run_ranks(_torchao_divided, 2, base, tmp_path, loaded)


def _merges(base: Path, kinds: tuple[str, ...]) -> None:
    """Check that a copy made inside a gather merges into exactly the codes that a model in one process gets."""
    for kind in kinds:
        build = partial(_weight_only, base, torch.float32) if kind == "torchao" else partial(quantized, base, kind)
        wanted = dict(build().merge_and_unload().named_parameters())
        engine = initialize(build(), Run(3))
        with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
            merged = dict(copy.deepcopy(engine.module).merge_and_unload().named_parameters())
        engine.destroy()
        assert merged.keys() == wanted.keys()
        for name, value in wanted.items():
            if kind == "torchao" and hasattr(value, "qdata"):
                _same_codes(merged[name], value)
            else:
                assert torch.equal(value_of(merged[name]), value_of(value)), (kind, name)


def test_adapters_merge_inside_a_gather(base: Path) -> None:
    ranks.run_ranks(_merges, 2, base, ("nf4", "torchao") if importlib.util.find_spec("torchao") else ("nf4",))


# ------------------------------------------------------------------------------------------------ what is refused


def _refusals(base: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = quantized(base, "nf4")
    with pytest.raises(UnsupportedError, match="tensor parallelism cannot divide packed weights"):
        initialize(model, Run(0, extra={"tensor_parallel": {"autotp_size": 2}}))
    unquantized = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64), nn.Linear(64, 1))
    with pytest.raises(StateError, match=r"0.weight is marked for bitsandbytes but not quantized yet"):
        hf_zero.initialize(model=unquantized, config=Run(3).config())
    unquantized.to("cpu")
    unquantized[0].weight.quant_state.packing_format_for_cpu = True  # as a forward in eval mode leaves it, on some CPUs
    with pytest.raises(StateError, match="0 ran in eval mode on this CPU"):
        hf_zero.initialize(model=unquantized, config=Run(3).config())
    whole = AutoModelForCausalLM.from_pretrained(base)
    engine = initialize(whole, Run(3))
    engine.save_checkpoint(str(folder))
    engine.destroy()
    small = AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(**KINDS["int8"]))
    small = hf_zero.initialize(model=small, config=Run(3).config())[0]
    with pytest.raises(CheckpointError, match="is quantized in this model, and the checkpoint has values of it"):
        small.load_checkpoint(str(folder), load_module_strict=False)
    small.destroy()


def test_what_cannot_be_is_said(base: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_refusals, 2, base, tmp_path)
