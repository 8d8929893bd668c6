"""Refused names: the reason reaches the user whichever way he asks, and probing goes on working."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import pytest
import torch

import hf_zero.deepspeed
from hf_zero.errors import UnsupportedError

pytestmark = pytest.mark.quick

hf_zero.deepspeed.install_as_deepspeed()
deepspeed = importlib.import_module("deepspeed")


def _import_from(module: str, name: str) -> Callable[[], None]:
    return lambda: exec(f"from {module} import {name}", {})


@pytest.mark.parametrize(
    ("ask", "also", "text"),
    [
        (lambda: deepspeed.init_inference, AttributeError, "vLLM"),
        (lambda: deepspeed.runtime.zero.stage3.print_rank_0, AttributeError, "engine.optimizer"),
        (_import_from("deepspeed.runtime.pipe.schedule", "TrainSchedule"), ImportError, "torch.distributed.pipelining"),
        (_import_from("deepspeed.sequence.fpdt_layer", "FPDT_Attention"), ImportError, "DistributedAttention"),
        (lambda: importlib.import_module("deepspeed.moe.mappings"), ImportError, "expert_parallel"),
        (lambda: deepspeed.accelerator.get_accelerator().lazy_call, AttributeError, "torch.accelerator"),
    ],
)
def test_refused_name_says_what_to_use_instead(ask: Callable[[], object], also: type[Exception], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text) as caught:
        ask()
    assert isinstance(caught.value, NotImplementedError) and isinstance(caught.value, also)


def test_probing_is_answered_not_raised() -> None:
    assert not hasattr(deepspeed, "init_inference")
    assert getattr(deepspeed, "inference", None) is None
    assert not hasattr(deepspeed.utils, "__wrapped__")
    assert importlib.util.find_spec("deepspeed.no_such_module") is None
    try:
        from deepspeed.autotuning import Autotuner  # noqa: F401
    except ImportError:
        optional = False
    else:
        optional = True
    assert not optional


def test_a_class_that_is_only_imported_refuses_to_be_made() -> None:
    """Registries, helpers of suites and model files import such at their top, for what most of them never build."""
    from deepspeed.runtime.fp16.onebit import OnebitLamb, ZeroOneAdam

    for kind in (OnebitLamb, ZeroOneAdam):  # MMEngine registers them
        assert isinstance(kind, type) and not isinstance(object(), kind)
        with pytest.raises(UnsupportedError, match=rf"{kind.__name__} is not provided.*optimizer\.type OneBitAdam"):
            kind([torch.zeros(1)], lr=0.1)
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    with pytest.raises(UnsupportedError, match="checkpoint writers are not pluggable"):
        TorchCheckpointEngine()
    from deepspeed.compression.compress import init_compression  # so does Megatron's training.py, whatever it trains

    with pytest.raises(UnsupportedError, match=r"init_compression is not provided.*torchao"):
        init_compression(torch.nn.Linear(1, 1), {})


def test_misspelt_name_is_an_attribute_error_with_the_nearest_name() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'initalize'; did you mean deepspeed\.initialize\?"):
        _ = deepspeed.initalize
    with pytest.raises(ModuleNotFoundError, match="deepspeed.frobnicate"):
        importlib.import_module("deepspeed.frobnicate")


def test_other_names_of_served_modules_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(ImportError, match=r"see_memory_usag is not provided.*; did you mean deepspeed\.runtime\.utils\.see_memory_usage\?"):
        from deepspeed.runtime.utils import see_memory_usag  # noqa: F401
    with pytest.raises(ImportError, match="an inner part of DeepSpeed"):
        from deepspeed.runtime.zero.partition_parameters import AllGatherHandle  # noqa: F401
    assert not hasattr(deepspeed.comm, "all_reduce_coalesced")
