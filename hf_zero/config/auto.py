"""Sources of the keys that the configuration sets to "auto", and the keys that must agree with the training arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_ZERO = "zero_optimization"


@dataclass(frozen=True)
class AutoRule:
    """Rule that fills a key set to "auto".

    Attributes:
        sources: Names of the source values; all are needed.
        fill: Function that computes the value from them, in that order.
        must_match: A value in the file must equal the source's; otherwise both are reported as a mismatch.
    """

    sources: tuple[str, ...]
    fill: Callable[..., Any] = lambda value: value
    must_match: bool = False

    def value(self, sources: Mapping[str, Any]) -> Any:
        """Return the value from `sources`, or None when one of them is missing."""
        given = [sources.get(name) for name in self.sources]
        return None if any(value is None for value in given) else self.fill(*given)

    def label(self) -> str:
        """Return the names of the sources as text for messages."""
        return " + ".join(self.sources) or "constant"


AUTO_RULES: dict[str, AutoRule] = {
    "train_micro_batch_size_per_gpu": AutoRule(("per_device_train_batch_size",), must_match=True),
    "gradient_accumulation_steps": AutoRule(("gradient_accumulation_steps",), must_match=True),
    "gradient_clipping": AutoRule(("max_grad_norm",), must_match=True),
    "optimizer.params.lr": AutoRule(("learning_rate",), must_match=True),
    "optimizer.params.betas": AutoRule(("adam_beta1", "adam_beta2"), lambda beta1, beta2: [beta1, beta2], must_match=True),
    "optimizer.params.eps": AutoRule(("adam_epsilon",), must_match=True),
    "optimizer.params.weight_decay": AutoRule(("weight_decay",), must_match=True),
    "scheduler.params.warmup_min_lr": AutoRule((), lambda: 0),
    "scheduler.params.warmup_max_lr": AutoRule(("learning_rate",), must_match=True),
    "scheduler.params.warmup_num_steps": AutoRule(("warmup_num_steps",), lambda steps: max(1, int(steps)), must_match=True),
    "scheduler.params.total_num_steps": AutoRule(("total_num_steps",), must_match=True),
    "fp16.enabled": AutoRule(("fp16",), bool, must_match=True),
    "bf16.enabled": AutoRule(("bf16",), bool, must_match=True),
    f"{_ZERO}.reduce_bucket_size": AutoRule(("hidden_size",), lambda hidden: hidden * hidden),
    f"{_ZERO}.stage3_prefetch_bucket_size": AutoRule(("hidden_size",), lambda hidden: int(0.9 * hidden * hidden)),
    f"{_ZERO}.stage3_param_persistence_threshold": AutoRule(("hidden_size",), lambda hidden: 10 * hidden),
    f"{_ZERO}.stage": AutoRule(("zero_stage",)),
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": AutoRule(("zero3_save_16bit_model",), bool),
    f"{_ZERO}.offload_optimizer.device": AutoRule(("offload_optimizer_device",)),
    f"{_ZERO}.offload_optimizer.nvme_path": AutoRule(("offload_optimizer_nvme_path",)),
    f"{_ZERO}.offload_param.device": AutoRule(("offload_param_device",)),
    f"{_ZERO}.offload_param.nvme_path": AutoRule(("offload_param_nvme_path",)),
}
"""Dotted key -> rule. `train_batch_size` has no rule: it follows from the batch identity."""

SOURCE_NAMES: frozenset[str] = frozenset(name for rule in AUTO_RULES.values() for name in rule.sources) | {"world_size"}
"""Every name that `resolve(sources=...)` understands."""
