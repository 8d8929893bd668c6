"""Models whose parameters are shards from construction on: read whole, and built like Trainer and accelerate build them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from tests.support.parity import Run


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters, whole. Collective."""
    import hf_zero

    named = list(model.named_parameters())
    with hf_zero.zero.GatheredParameters([parameter for _, parameter in named]):
        return {name: parameter.detach().clone() for name, parameter in named}


@contextmanager
def transformers_zero3(run: Run) -> Iterator[None]:
    """Yield an object that, like in Trainer and accelerate, makes transformers build and load models inside zero.Init while it lives."""
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    holder = HfDeepSpeedConfig(run.config())
    assert is_deepspeed_zero3_enabled()
    yield
    del holder
    assert not is_deepspeed_zero3_enabled()
