"""Use transformers' ``DistributedConfig`` together with a DeepSpeed configuration: its sizes become claims about the engine's mesh.

[Note: DistributedConfig] ``from_pretrained(distributed_config=...)`` divides a model over ranks while it is loaded, with torch's
distributed tensors, which no engine can shard further. If a DeepSpeed configuration is in use, the model is loaded as without the argument,
and the sizes are recorded on it. ``initialize`` combines them with the claims of all other sources.
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
    """The sizes of axes that a ``DistributedConfig`` requests.

    Args:
        given: A ``DistributedConfig``, or a dictionary of its fields.

    Raises:
        UnsupportedError: It requests a feature that is not supported with a DeepSpeed configuration.
    """

    def __init__(self, given: Any) -> None:
        self._settings = _settings(given)
        self._claims = tuple(_claims(self._settings))

    @contextmanager
    def known(self) -> Iterator[None]:
        """Return a context in which ``claims_of_load`` returns these sizes, for use while the model is loaded."""
        token = _loading.set(self._claims)
        try:
            yield
        finally:
            _loading.reset(token)

    def note_on(self, model: nn.Module) -> None:
        """Record the sizes on ``model``, where ``initialize`` reads them.

        Raises:
            ConfigError: The ``ep_plan`` names modules or parameters that ``model`` does not have.
            UnsupportedError: The ``ep_plan`` requests an unsupported style.
        """
        _check_plan(self._settings.get("ep_plan"), model)
        setattr(model, CLAIMS, self._claims)


def claims_of_load() -> tuple[Claim, ...]:
    """Return the claims about the mesh from the ``distributed_config`` of the ``from_pretrained`` that is running."""
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
            f"tokens are sent by all-to-all; set it to {' or '.join(map(repr, _IMPLEMENTATIONS))}",
        ),
    }
    for name, (asked, instead) in refused.items():
        if asked:
            raise UnsupportedError(
                f"DistributedConfig.{name} is {settings[name]!r}, which is not supported with a DeepSpeed configuration: {instead}"
            )
    sizes = {name: int(settings.get(name) or 1) for name in _AXES}
    if settings.get("tp_plan") == {}:  # these ranks split no layers, only experts, and have their own samples here
        sizes["fsdp_size"], sizes["tp_size"] = sizes["fsdp_size"] * sizes["tp_size"], 1
    for name, axis in _AXES.items():
        if sizes[name] > 1:
            yield Claim(axis, sizes[name], f"DistributedConfig.{name}")


def _check_plan(plan: Mapping[str, str] | None, model: nn.Module) -> None:
    """Raise if ``plan`` names patterns that match nothing in ``model``, or styles that are not supported; experts are found without it."""
    names = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name, _ in (*model.named_modules(), *model.named_parameters())}
    prefix = getattr(model, "base_model_prefix", "")
    for pattern, style in (plan or {}).items():
        if not {pattern, f"{prefix}.{pattern}"} & names:
            near = sorted(name for name in names if name.endswith("experts"))
            raise ConfigError(
                f"DistributedConfig.ep_plan names {pattern!r}, which {type(model).__name__} does not have; its experts are {near}"
            )
        if style not in (_DISPATCH, _STACKED):
            raise UnsupportedError(
                f"DistributedConfig.ep_plan requests {style!r} for {pattern!r}; with a DeepSpeed configuration {_DISPATCH!r} and "
                f"{_STACKED!r} are allowed"
            )
