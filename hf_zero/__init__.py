"""hf_zero: a ZeRO engine for Hugging Face Trainer and Accelerate that takes DeepSpeed configurations. Names load on first use."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"  # the only place: pyproject.toml reads it from here

_NAMES = {
    "initialize": "hf_zero.integrations.attach",
    "Engine": "hf_zero.deepspeed.engine",
    "init_distributed": "hf_zero.comm.bootstrap",
    "install_as_deepspeed": "hf_zero.deepspeed",
    "ZeroPlugin": "hf_zero.integrations.accelerate_plugin",
    "ZeroTrainingArguments": "hf_zero.integrations.training_arguments",
    "DummyOptim": "hf_zero.integrations.accelerate_plugin",
    "DummyScheduler": "hf_zero.integrations.accelerate_plugin",
    "ZeroStrategy": "hf_zero.integrations.lightning",
    "FabricZeroStrategy": "hf_zero.integrations.lightning",
    "AveragedWeightsCallback": "hf_zero.integrations.averages",
    "zero": "hf_zero.zero",
    "utils": "hf_zero.utils",
    "errors": "hf_zero.errors",
    "optim": "hf_zero.optim",
}
_MODULES = ("zero", "utils", "errors", "optim")

__all__ = ["__version__", *_NAMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'hf_zero' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = importlib.import_module(_NAMES[name])
    return module if name in _MODULES else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
