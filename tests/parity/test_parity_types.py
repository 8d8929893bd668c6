"""Test that buffers keep the dtype they were loaded in and named parameters stay in fp32, against plain PyTorch with the same cast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parity.tables import loaded_types
from tests.parity.tables import types_table as make_types_table
from tests.parity.tables.parity_table import TYPES, replace_section
from tests.support import ranks, senses, zoo
from tests.support.models import CASES, Mlp, class_loss
from tests.support.parity import DTYPES, Run, check, check_bitwise, initialize, prepare, reference, train
from tests.support.rows import thinned
from tests.support.versions import needs
from tests.support.zero3 import transformers_zero3, whole_parameters

STAGES = (0, 1, 2, 3)
HALF = ("bf16", "fp16")
NEEDS_5 = needs("transformers", "5.0", "fewer architectures, and no plan of types to compare with")
MLP = CASES["mlp"]
SOME = [
    "T5ForConditionalGeneration",  # fp32 layers in fp16
    "FlintForCausalLM",  # fp32 parameters in both
    "DeepseekV3ForCausalLM",  # correction biases
    "ModernBertForMaskedLM",  # rotary tables by layer type
    "GPTJForCausalLM",  # a table of sines
    "Gemma3ForCausalLM",  # a scale of embeddings
    "GptOssForCausalLM",  # fp32 norms in fp16
    "Ernie4_5_MoeForCausalLM",  # frozen fp32 parameters
]

SOME_SENSES = [
    "ResNetForImageClassification",  # batch norms
    "Wav2Vec2ForSequenceClassification",  # a weight that a parametrization makes
    "MobileNetV2ForImageClassification",  # many small batch norms
    "WhisperForConditionalGeneration",  # sound in, text out
    "Qwen2VLForConditionalGeneration",  # rotary tables of pictures
]


def _shown(rows: list[loaded_types.Row]) -> list[str]:
    return [f"{row.name}: {text}" for row in rows for text in row.differences]


@pytest.mark.slow  # fast: test_canary.py, and the other tests of this file
@NEEDS_5
def test_some_architectures_stay_as_loaded() -> None:
    rows = ranks.run_ranks(loaded_types.measure_each, 2, SOME, True)[0]
    assert _shown(rows) == []
    assert [row.name for row in rows if row.notes] == []
    assert all(row.engines >= 1 and row.forwards >= 1 for row in rows)
    assert sum(row.kept for row in rows) >= 6 and sum(row.buffers for row in rows) >= 8


@pytest.mark.slow  # `test_some_architectures_stay_as_loaded` asks the same of text
@NEEDS_5
def test_some_models_of_images_and_sound_stay_as_loaded() -> None:
    rows = ranks.run_ranks(loaded_types.measure_each, 2, SOME_SENSES, True)[0]
    assert _shown(rows) == []
    assert [row.name for row in rows if row.notes] == []
    assert all(row.engines >= 1 for row in rows)
    assert sum(row.forwards for row in rows) >= 3 and sum(row.buffers for row in rows) >= 40


@NEEDS_5
@pytest.mark.slow
@pytest.mark.parametrize("names", [loaded_types.text_names, senses.architectures], ids=["text", "images and sound"])
def test_all_architectures_stay_as_loaded(names: Callable[[], list[str]]) -> None:
    rows = list(loaded_types.measure_all(names()))
    assert _shown(rows) == []
    assert len(rows) == len(names()) > 0


def test_the_pages_table_counts_what_was_tried_and_leaves_other_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [loaded_types.Row("A", engines=5, kept=1, buffers=2, forwards=3), loaded_types.Row("B", 4, differences=["x"], notes=["y"])]
    monkeypatch.setattr(make_types_table, "KINDS", {"text": ("text", lambda: ["A"]), "senses": ("images", lambda: ["B", "C"])})
    monkeypatch.setattr(senses, "refusals", lambda: {"D": "ImportError: a | b"})
    page = tmp_path / "page.md"
    page.write_text("first\n\n## Architectures\n\nsecond\n")
    for _ in range(2):
        replace_section(page, TYPES, make_types_table.render(rows, thinned=True))
    before, title, text = page.read_text().partition(TYPES)
    assert before == "first\n\n## Architectures\n\nsecond\n\n" and title not in text
    assert "| text | 1 | 0 | 5 | 1 | 2 | 3 | 0 |" in text and "| images | 1 of 2 tried | 1 | 4 | 0 | 0 | 0 | 1 |" in text
    assert "| B | x |" in text and "| B | y |" in text and "| D | ImportError: a / b |" in text


# ------------------------------------------------------------------------------------------------ long positions


def _logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    return logits


def _far_positions(name: str, stages: tuple[int, ...]) -> None:
    changes = {"max_position_embeddings": 8192}
    tokens = zoo.batch(name, torch.Generator().manual_seed(0))["input_ids"].to(ranks.device())
    inputs = {"input_ids": tokens, "position_ids": 4096 + torch.arange(tokens.shape[1], device=ranks.device())[None]}
    plain = zoo.build(name, changes=changes).eval().to(ranks.device())
    rounded = copy.deepcopy(plain).bfloat16()
    for inner in rounded.modules():
        inner._buffers.update(
            {key: value.bfloat16() for key, value in inner._buffers.items() if value is not None and value.is_floating_point()}
        )
    for param in plain.parameters():
        param.data = param.data.bfloat16()
    expected = _logits(plain, inputs)
    assert not torch.equal(expected, _logits(rounded, inputs)), "rounded tables would not be seen"
    for stage in stages:
        engine = initialize(zoo.build(name, changes=changes).eval(), Run(stage=stage, dtype="bf16"))
        engine.eval()
        assert torch.equal(_logits(engine, inputs), expected), f"{name}, stage {stage}"
        engine.destroy()


def _far_positions_of_three() -> None:
    for name in ("LlamaForCausalLM", "Gemma3ForCausalLM", "ModernBertForMaskedLM"):
        _far_positions(name, (0, 3))


@NEEDS_5
def test_logits_behind_position_4096_are_those_without_the_engine() -> None:
    ranks.run_ranks(_far_positions_of_three, 2)


# ------------------------------------------------------------------------------------------------ named parameters


class Wide(nn.Linear):
    """A module that computes in the dtype of its weight, as fp32 layers of libraries do."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.to(self.weight.dtype)).to(inputs.dtype)


class Mixed(Mlp):
    """A model with fp32 layers among others, one frozen, one tied to another name; fp32 and fp64 buffers, statistics."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.wide = Wide(16, 16)
        self.wide_frozen = Wide(16, 16).requires_grad_(False)
        self.again = self.blocks[0].wide
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("table", torch.randn(16) / 3)
        self.register_buffer("exact", torch.full((2,), 1 / 3, dtype=torch.float64))
        self.register_buffer("coarse", torch.randn(4).bfloat16())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.entry(inputs))
        for block in self.blocks:
            hidden = block.wide(block(hidden))
        hidden = self.again(self.wide_frozen(hidden)) * self.table.to(hidden.dtype)
        return self.head(hidden)


def build_mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


NAMED: dict[str, Any] = {"data_types": {"keep_in_fp32_modules": ["wide", "norm"]}}
BUFFERS = {
    "norm.running_mean": torch.float32, "norm.running_var": torch.float32, "table": torch.float32, "exact": torch.float64,
    "coarse": torch.bfloat16,
}  # fmt: skip


def _types(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        assert buffer.dtype == BUFFERS.get(name, torch.int64), name


def _named_parameters(run: Run, offload: dict[str, Any] | None = None) -> None:
    """Train with fp32 layers, which plain PyTorch does on its own fp32 and 16-bit parameters."""
    run = Run(**{**vars(run), "extra": {**NAMED, **({"zero_optimization": offload} if offload else {})}})
    engine = initialize(build_mixed(), run)
    _types(engine.module)
    trace = train(engine, MLP.rows, class_loss, run)
    _types(engine.module)
    wide = {name for name, param in engine.module.named_parameters() if param.dtype == torch.float32}
    assert wide == {name for name in trace.weights if "wide" in name or "norm" in name}
    for unit in engine.units:
        held = unit.layout.dtype == torch.float32 and unit.trainable and not offload
        assert not held or (unit.master is not None and unit.master.data_ptr() == unit.shard.data_ptr()), "the shard is the master"
    engine.destroy()
    if ranks.rank() == 0:
        follow = partial(_reference_of_mixed, run, ranks.world())
        check(trace, lambda follow_=None: follow(follow_), run, f"named parameters, {offload}")


def _reference_of_mixed(run: Run, world: int, follow: Any = None) -> Any:
    return reference(build_mixed(), MLP.rows, class_loss, run, world, follow)


def _named_parameters_each(stage: int, dtype: str) -> None:
    _named_parameters(Run(stage=stage, dtype=dtype, accumulation=2, clip=0.1))
    if stage:
        _named_parameters(Run(stage=stage, dtype=dtype), {"offload_optimizer": {"device": "cpu"}})
    if stage == 3:
        _named_parameters(Run(stage=stage, dtype=dtype), {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}})


@pytest.mark.fast_rows("3-bf16")
@thinned(3, stage=STAGES, dtype=HALF)
def test_parameters_that_stay_in_fp32_train_as_in_plain_pytorch(stage: int, dtype: str) -> None:
    ranks.run_ranks(_named_parameters_each, 2, stage, dtype)


def _built_inside_init(dtype: str) -> None:
    """Check that zero.Init casts the same tensors as initialize, with the same numbers: a model built unsharded, and one built sharded."""
    import hf_zero

    run = Run(stage=3, dtype=dtype, extra=NAMED)
    with hf_zero.zero.Init(config_dict_or_path=run.config()):
        model = build_mixed()
    _types(model)
    plain = dict(build_mixed().named_parameters())
    for name, value in whole_parameters(model).items():
        wanted = plain[name] if "wide" in name or "norm" in name else plain[name].to(DTYPES[dtype])
        assert value.dtype == wanted.dtype and torch.equal(value.cpu(), wanted), name
    sharded, whole = (train(initialize(each, run), MLP.rows, class_loss, run) for each in (model, build_mixed()))
    check_bitwise(sharded, whole, "built inside zero.Init")


def test_a_model_built_inside_zero_init_has_the_same_types_and_numbers() -> None:
    for dtype in HALF:
        ranks.run_ranks(_built_inside_init, 2, dtype)


# ------------------------------------------------------------------------------------------------ statistics, configuration


def _statistics(stage: int) -> None:
    """Check that statistics and their norm stay in fp32 without a name; ``buffer_dtype`` casts both."""
    run = Run(stage=stage, dtype="bf16", extra={"data_types": {"keep_in_fp32_modules": ["wide"]}})
    engine = initialize(build_mixed(), run)
    train(engine, MLP.rows, class_loss, run)
    norm = engine.module.norm
    assert (norm.weight.dtype, norm.running_var.dtype) == (torch.float32, torch.float32)
    assert not torch.equal(norm.running_var, norm.running_var.bfloat16().float()), "statistics were rounded"
    assert engine.module.entry.weight.dtype == torch.bfloat16
    engine.destroy()
    cast = Run(stage=stage, dtype="bf16", extra={"data_types": {"keep_in_fp32_modules": [], "buffer_dtype": "bf16"}})
    engine = initialize(build_mixed(), cast)
    train(engine, MLP.rows, class_loss, cast)
    assert {buffer.dtype for buffer in engine.module.buffers() if buffer.is_floating_point()} == {torch.bfloat16}
    assert {param.dtype for param in engine.module.parameters()} == {torch.bfloat16}
    engine.destroy()


def _alike(engine: Any) -> dict[str, Tensor]:
    """Give all ranks rank 0's buffers, of which statistics differ, and return copies."""
    for buffer in engine.module.buffers():
        value = buffer.cpu()
        dist.broadcast(value, 0)
        buffer.copy_(value)
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def _old_checkpoint(folder: str, stage: int) -> None:
    """Load a checkpoint of rounded buffers and parameters, as earlier versions wrote them; a new one is unrounded."""
    run = Run(stage=stage, dtype="bf16", extra={"data_types": {"keep_in_fp32_modules": [], "buffer_dtype": "bf16"}})
    old = initialize(build_mixed(), run)
    train(old, MLP.rows, class_loss, run)
    rounded = _alike(old)
    old.save_checkpoint(folder, "old")
    frozen = whole_parameters(old.module)["wide_frozen.weight"]
    old.destroy()
    engine = initialize(build_mixed(), Run(stage=stage, dtype="bf16", extra=NAMED))
    engine.load_checkpoint(folder, "old")
    _types(engine.module)
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, rounded[name].to(buffer.dtype)), name
    values = whole_parameters(engine.module)
    assert values["wide_frozen.weight"].dtype == torch.float32 and torch.equal(values["wide_frozen.weight"], frozen.float())
    trace = train(engine, MLP.rows, class_loss, run)
    assert torch.equal(trace.weights["blocks.0.wide.weight"], trace.masters["blocks.0.wide.weight"])
    exact = _alike(engine)
    engine.save_checkpoint(folder, "new")
    train(engine, MLP.rows, class_loss, run)
    engine.load_checkpoint(folder, "new")
    assert all(torch.equal(buffer, exact[name]) for name, buffer in engine.module.named_buffers())
    engine.destroy()


def _not_cast(stage: int) -> None:
    """Check that torch's error for a forward that does not cast is extended by the tensors that kept their dtype and by advice."""
    model = build_mixed()
    model.forward = lambda inputs: model.head(model.entry(inputs) + model.table)
    engine = initialize(model, Run(stage=stage, dtype="bf16"))
    with pytest.raises(RuntimeError, match=r"(?s)dtype.*Buffers stay as they were loaded:.*table \(float32\).*buffer_dtype"):
        class_loss(engine, prepare(MLP.rows(0, 0, 0), torch.bfloat16))
    engine.destroy()
    engine = initialize(MLP.build(), Run(stage=stage, dtype="fp16"))
    rows = MLP.rows(0, 0, 0)
    with pytest.raises(RuntimeError, match=r"(?s)type.*Buffers are float16 too, so an input.*fp16\.auto_cast.*torch\.autocast"):
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            class_loss(engine, rows)
    engine.destroy()


def _small_cases(folder: str) -> None:
    for stage in (2, 3):
        _statistics(stage)
        _old_checkpoint(f"{folder}/{stage}", stage)
        _not_cast(stage)


def test_statistics_old_checkpoints_and_a_forward_that_does_not_cast(tmp_path: Path) -> None:
    ranks.run_ranks(_small_cases, 2, str(tmp_path))


# ------------------------------------------------------------------------------------------------ from_config


def _from_config() -> None:
    """Check that ``from_config`` in 16 bit keeps no parameter in fp32, sharded or not; in fp32 the named parameters are not rounded."""
    name = "T5ForConditionalGeneration"
    config = zoo.small_config(name)
    cls = type(zoo.build(name))
    for dtype in (torch.float32, torch.float16):
        plain = initialize(cls._from_config(copy.deepcopy(config), dtype=dtype), Run(stage=2, dtype="fp16"))
        wanted = loaded_types.types_of(plain.module)
        plain.destroy()
        with transformers_zero3(Run(stage=3, dtype="fp16")):
            model = cls._from_config(copy.deepcopy(config), dtype=dtype)
            assert loaded_types.types_of(model) == wanted
            engine = initialize(model, Run(stage=3, dtype="fp16"))
        assert loaded_types.types_of(engine.module) == wanted
        assert (torch.float32 in {param.dtype for param in engine.module.parameters()}) == (dtype == torch.float32)
        engine.destroy()


@pytest.mark.slow  # fast: `test_a_model_built_inside_zero_init_has_the_same_types_and_numbers`
def test_from_config_gives_the_same_types_at_all_stages() -> None:
    ranks.run_ranks(_from_config, 2)
