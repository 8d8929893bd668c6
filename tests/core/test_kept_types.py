"""Test which tensors keep their dtype in a cast to 16 bit: named by a model's own lists, by the configuration, or as norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.assembly.kept_types import cast_unnamed, kept_types, named_for_fp32
from hf_zero.config.resolve import resolve
from hf_zero.core.step.precision import PrecisionPolicy
from hf_zero.errors import ConfigError
from tests.support.rows import each

pytestmark = pytest.mark.quick

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Layers(nn.Module):
    """Parameters and buffers whose names share parts."""

    def __init__(self, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.wo = nn.Linear(2, 2, bias=False, dtype=dtype)
        self.word = nn.Linear(2, 2, bias=False, dtype=dtype)
        self.layers = nn.ModuleList(nn.ModuleDict({"wo": nn.Linear(2, 2, bias=False, dtype=dtype)}) for _ in range(2))
        self.register_buffer("bias_of_experts", torch.zeros(2, dtype=dtype))
        self.register_buffer("exact", torch.zeros(2, dtype=torch.float64))


class OldModel(Layers):
    """A model with lists as transformers 4 and diffusers read them: complete parts of names."""

    _keep_in_fp32_modules = ("wo",)
    _keep_in_fp32_modules_strict = None

    def __init__(self, dtype: torch.dtype = FP32) -> None:
        super().__init__(dtype)
        self._keep_in_fp32_modules_strict = ["bias_of_experts"]


class NewModel(Layers):
    """A model with a plan as transformers 5 makes it: parts of names anywhere, ``*`` for any characters."""

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        plan = {"layers.*.wo": FP32} if dtype in (BF16, FP16) else {}
        return plan | ({"wo": FP32} if dtype == FP16 else {})


class Wrapper(nn.Module):
    """A wrapper that forwards attribute lookups, as PEFT's models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def _names(model: nn.Module, dtype: torch.dtype, patterns: list[str] | None = None, buffer_dtype: Any = None) -> dict[str, torch.dtype]:
    kept = kept_types(model, PrecisionPolicy(param_dtype=dtype, buffer_dtype=buffer_dtype), patterns)
    return {name: kept[id(tensor)] for name, tensor in [*model.named_parameters(), *model.named_buffers()] if id(tensor) in kept}


OLD_NAMES = {"wo.weight", "layers.0.wo.weight", "layers.1.wo.weight"}
CASES: list[tuple[nn.Module, torch.dtype, set[str]]] = [
    (OldModel(), BF16, {"bias_of_experts"}),
    (OldModel(), FP16, OLD_NAMES | {"bias_of_experts"}),
    (OldModel(), FP32, set()),
    (NewModel(), BF16, {"layers.0.wo.weight", "layers.1.wo.weight"}),
    (NewModel(), FP16, OLD_NAMES | {"word.weight"}),
    (NewModel(), FP32, set()),
    (Wrapper(OldModel()), BF16, {"inner.bias_of_experts"}),
    (Wrapper(NewModel()), BF16, {"inner.layers.0.wo.weight", "inner.layers.1.wo.weight"}),
    (nn.ModuleList([OldModel(), NewModel()]), BF16, {"0.bias_of_experts", "1.layers.0.wo.weight", "1.layers.1.wo.weight"}),
    (Layers(), FP16, set()),
]


def test_a_model_s_own_lists_are_read_as_its_library_reads_them() -> None:
    def check(case: tuple[nn.Module, torch.dtype, set[str]]) -> None:
        model, dtype, names = case
        assert _names(model, dtype) == dict.fromkeys(names, FP32)

    each(CASES, check)


def test_what_was_loaded_in_the_training_type_stays_so_and_the_other_16_bit_type_becomes_fp32() -> None:
    assert _names(OldModel(FP16), FP16) == dict.fromkeys(OLD_NAMES | {"bias_of_experts"}, FP16)
    assert _names(OldModel(BF16), FP16) == {**dict.fromkeys(OLD_NAMES, FP32), "bias_of_experts": BF16}


def test_the_configuration_s_names_take_the_place_of_the_model_s() -> None:
    assert _names(OldModel(), FP16, []) == {}
    assert _names(OldModel(FP16), FP16, ["wo"]) == dict.fromkeys(OLD_NAMES | {"word.weight"}, FP32)
    assert _names(OldModel(), BF16, ["layers.*.wo", "exact"]) == {
        "layers.0.wo.weight": FP32,
        "layers.1.wo.weight": FP32,
        "exact": torch.float64,
    }
    assert _names(OldModel(), FP32, ["wo"]) == {}


def test_a_norm_stays_with_its_statistics() -> None:
    norms = nn.ModuleDict({"batch": nn.BatchNorm2d(2), "free": nn.BatchNorm2d(2, track_running_stats=False), "layer": nn.LayerNorm(2)})
    assert _names(norms, BF16) == {"batch.weight": FP32, "batch.bias": FP32}
    assert _names(norms, BF16, buffer_dtype=BF16) == {}
    assert _names(norms.to(BF16), BF16) == {}
    assert _names(norms.to(BF16), BF16, buffer_dtype=FP32) == {"batch.weight": FP32, "batch.bias": FP32}


def test_what_a_library_loads_in_fp32() -> None:
    model = OldModel()
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert {names[id(tensor)] for tensor in named_for_fp32(model, BF16)} == {"bias_of_experts"}
    assert list(named_for_fp32(model, FP32)) == []


def test_a_cast_of_parameters_leaves_named_ones_and_buffers() -> None:
    model = cast_unnamed(OldModel(), FP16)
    kinds = {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert kinds == {"word.weight": FP16, **dict.fromkeys(OLD_NAMES, FP32), "bias_of_experts": FP32, "exact": torch.float64}


def test_a_name_that_is_no_pattern_is_refused() -> None:
    section = {"keep_in_fp32_modules": ["gate("]}
    with pytest.raises(ConfigError, match=r"data_types.keep_in_fp32_modules` has \"gate\(\", which is no pattern"):
        resolve({"train_micro_batch_size_per_gpu": 1, "data_types": section}, world_size=1)
    resolve({"train_micro_batch_size_per_gpu": 1, "data_types": {"keep_in_fp32_modules": "auto"}}, world_size=1)
