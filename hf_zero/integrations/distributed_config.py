"""transformers' ``DistributedConfig`` beside a DeepSpeed configuration: what it says of the ranks is the mesh's, and the engine does it.

[Note: DistributedConfig] ``from_pretrained(distributed_config=...)`` divides a model over ranks while it is loaded, with torch's
distributed tensors, which no engine shards further. Where a configuration of ours is in use, the model is loaded as without the argument,
and its sizes are noted on it: ``initialize`` takes them for claims beside all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from hf_zero.assembly.mesh import CLAIMS
from hf_zero.config.mesh import EXPERT, SHARD_GROUP, Claim
from hf_zero.errors import ConfigError, UnsupportedError

_AXES = {"ep_size": EXPERT, "tp_size": "tp", "dp_replicate_size": "dp_replicate", "fsdp_size": SHARD_GROUP, "pp_size": "pp"}
_DISPATCH, _STACKED = "ep_dispatch_experts", "grouped_gemm"
_IMPLEMENTATIONS = ("auto", "all_to_all")
_loading: ContextVar[tuple[Claim, ...]] = ContextVar("hf_zero sizes of a load", default=())


class NotedSizes:
    """What a ``DistributedConfig``, or a dictionary of its fields, says of the ranks.

    Args:
        given: It.

    Raises:
        UnsupportedError: It asks for something that is not provided.
    """

    def __init__(self, given: Any) -> None:
        self._settings = _settings(given)
        self._claims = tuple(_claims(self._settings))

    @contextmanager
    def known(self) -> Iterator[None]:
        """A context in which ``claims_of_load`` has them: the model is being loaded."""
        token = _loading.set(self._claims)
        try:
            yield
        finally:
            _loading.reset(token)

    def note_on(self, model: nn.Module) -> None:
        """Leaves it for ``initialize`` to find.

        Raises:
            ConfigError: The ``ep_plan`` names what ``model`` does not have.
        """
        _check_plan(self._settings.get("ep_plan"), model)
        setattr(model, CLAIMS, self._claims)


def claims_of_load() -> tuple[Claim, ...]:
    """What is said of the ranks by the ``from_pretrained`` that is running."""
    return _loading.get()


def _settings(given: Any) -> Mapping[str, Any]:
    from transformers.distributed import DistributedConfig

    config = DistributedConfig.from_dict(given) if isinstance(given, dict) else given
    return dict(config.to_dict())


def _claims(settings: Mapping[str, Any]) -> Iterator[Claim]:
    refused = {
        "fsdp_cpu_offload": (bool(settings.get("fsdp_cpu_offload")), 'write "offload_param": {"device": "cpu"} into zero_optimization'),
        "fsdp_mixed_precision": (bool(settings.get("fsdp_mixed_precision")), 'write "bf16": {"enabled": true} into the configuration'),
        "ep_implementation": (
            settings.get("ep_implementation", "auto") not in _IMPLEMENTATIONS,
            f"tokens travel by all-to-all: {' or '.join(map(repr, _IMPLEMENTATIONS))} is allowed",
        ),
    }
    for name, (asked, instead) in refused.items():
        if asked:
            raise UnsupportedError(f"DistributedConfig.{name} is {settings[name]!r} beside a DeepSpeed configuration: {instead}")
    sizes = {name: int(settings.get(name) or 1) for name in _AXES}
    if settings.get("tp_plan") == {}:  # these ranks split nothing: they are for experts, and have samples of their own here
        sizes["fsdp_size"], sizes["tp_size"] = sizes["fsdp_size"] * sizes["tp_size"], 1
    for name, axis in _AXES.items():
        if sizes[name] > 1:
            yield Claim(axis, sizes[name], f"DistributedConfig.{name}")


def _check_plan(plan: Mapping[str, str] | None, model: nn.Module) -> None:
    """Experts are found from the model's structure: a plan can only name what is there."""
    names = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name, _ in (*model.named_modules(), *model.named_parameters())}
    prefix = getattr(model, "base_model_prefix", "")
    for pattern, style in (plan or {}).items():
        if not {pattern, f"{prefix}.{pattern}"} & names:
            near = sorted(name for name in names if name.endswith("experts"))
            raise ConfigError(f"DistributedConfig.ep_plan names {pattern!r}, which {type(model).__name__} does not have; it has {near}")
        if style not in (_DISPATCH, _STACKED):
            raise UnsupportedError(
                f"DistributedConfig.ep_plan asks for {style!r} at {pattern!r}; {_DISPATCH!r} and {_STACKED!r} are allowed beside a "
                "DeepSpeed configuration"
            )
