"""Define the ZeRO plugin for `Accelerator(deepspeed_plugin=...)` and the placeholders of an optimizer and a scheduler."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from accelerate.utils import DeepSpeedPlugin
from accelerate.utils import DummyOptim as AccelerateDummyOptim
from accelerate.utils import DummyScheduler as AccelerateDummyScheduler
from typing_extensions import TypedDict, Unpack

from hf_zero.config.read import read_config
from hf_zero.errors import ConfigError
from hf_zero.integrations.typed_values import config_of_launcher, fill_missing, put
from hf_zero.observe import warn_once

__all__ = ["DummyOptim", "DummyScheduler", "ZeroPlugin"]

Device = Literal["none", "cpu", "nvme"]
_DEVICES = ("none", "cpu", "nvme")
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_NAMES_OF_ACCELERATE = {
    "hf_ds_config": "config",
    "zero_stage": "stage",
    "offload_optimizer_device": "offload_optimizer",
    "offload_param_device": "offload_param",
}
# accelerate computes these from `model.config.hidden_size`, and fails for models whose sizes are in a sub-config.
_RESOLVED_FROM_MODEL = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


class PluginOptions(TypedDict, total=False):
    """Keyword arguments that ``ZeroPlugin`` passes to accelerate's `DeepSpeedPlugin` unchanged."""

    is_train_batch_min: bool
    offload_optimizer_nvme_path: str | None
    offload_param_nvme_path: str | None
    zero3_init_flag: bool | None
    zero3_save_16bit_model: bool | None
    transformer_moe_cls_names: str | None
    enable_msamp: bool | None
    msamp_opt_level: Literal["O1", "O2"] | None


class ZeroPlugin(DeepSpeedPlugin):
    """Configure accelerate's `DeepSpeedPlugin` by a DeepSpeed JSON, by typed arguments, or by both, without writing files.

    A typed argument fills a value that the JSON lacks or leaves on ``"auto"``; an argument that contradicts the JSON is an error.
    Arguments that are not given come from the answers of `accelerate config`, as in accelerate's own plugin. ``"auto"`` values that
    accelerate cannot fill are resolved by hf_zero.

    Args:
        config: DeepSpeed configuration: path, dict, JSON text or base64 text.
        stage: ZeRO stage 0, 1, 2 or 3 (default 2).
        offload_optimizer: Device that stores optimizer state between steps: ``"none"``, ``"cpu"``, ``"nvme"`` or a complete
            `offload_optimizer` section.
        offload_param: Device that stores parameters between uses (stage 3); the same values, or an `offload_param` section.
        tensor_parallel_size: Number of ranks that hold one copy of each layer together.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``: bf16 with torchao's products in float8, also for the Accelerator.
        gradient_accumulation_steps: Micro-steps per optimizer step; None uses the Accelerator's value.
        gradient_clipping: Largest gradient norm; 0 turns clipping off.
        **options: Further arguments of `DeepSpeedPlugin` (``zero3_init_flag``, ``is_train_batch_min``, ...).

    Raises:
        ConfigError: An argument has a value outside its range, or arguments contradict the JSON (all are listed).
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        stage: Literal[0, 1, 2, 3] | None = None,
        offload_optimizer: Device | Mapping[str, Any] | None = None,
        offload_param: Device | Mapping[str, Any] | None = None,
        tensor_parallel_size: int | None = None,
        mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = None,
        gradient_accumulation_steps: int | None = None,
        gradient_clipping: float | None = None,
        **options: Unpack[PluginOptions],
    ) -> None:
        _require_own_names(options)
        _check("stage", stage, (0, 1, 2, 3))
        _check("mixed_precision", mixed_precision, _PRECISIONS)
        _check_at_least("tensor_parallel_size", tensor_parallel_size, 1)
        _check_at_least("gradient_accumulation_steps", gradient_accumulation_steps, 1)
        _check_at_least("gradient_clipping", gradient_clipping, 0)
        values: dict[str, Any] = {
            "zero_optimization.stage": stage,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "gradient_clipping": gradient_clipping,
            "tensor_parallel.autotp_size": tensor_parallel_size if tensor_parallel_size != 1 else None,
            **_precision_values(mixed_precision),
            **_offload_values("offload_optimizer", offload_optimizer),
            **_offload_values("offload_param", offload_param),
        }
        self.asks_for = mixed_precision if mixed_precision == "fp8" else None
        source = config if config is not None else config_of_launcher()
        self._config_in_code = config is not None
        if source is None:
            self._start_from_answers(values, options)
        else:
            self._start_from_config(read_config(source), values, options)

    def _start_from_answers(self, values: dict[str, Any], options: PluginOptions) -> None:
        """Let accelerate's plugin build its configuration from the launcher's settings, and overwrite it with the typed arguments."""
        if "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL" not in os.environ:
            # The user did not answer this question, so a warning that the answer has no effect would be wrong.
            options.setdefault("zero3_save_16bit_model", True)
        super().__init__(
            zero_stage=values["zero_optimization.stage"],
            gradient_accumulation_steps=values["gradient_accumulation_steps"],
            offload_optimizer_device=values.get("zero_optimization.offload_optimizer.device"),
            offload_param_device=values.get("zero_optimization.offload_param.device"),
            **options,
        )
        for key, value in values.items():
            if value is not None:
                put(self.deepspeed_config, key, value)
        if values["gradient_clipping"] is not None:
            self.gradient_clipping = values["gradient_clipping"]
        self.hf_ds_config.set_stage_and_offload()

    def _start_from_config(self, raw: dict[str, Any], values: dict[str, Any], options: PluginOptions) -> None:
        """Complete the user's configuration with the typed arguments, and pass it to accelerate's plugin as a dict."""
        conflicts = [
            f"- {key}: the configuration says {found!r}, ZeroPlugin was given {value!r}" for key, found, value in fill_missing(raw, values)
        ]
        if conflicts:
            raise ConfigError(
                "ZeroPlugin's arguments contradict its configuration:\n"
                + "\n".join(conflicts)
                + '\nDrop the arguments, or write "auto" for these keys in the configuration.'
            )
        # accelerate's plugin would set 1, which would override the Accelerator's number.
        raw.setdefault("gradient_accumulation_steps", "auto")
        steps_per_print = raw.get("steps_per_print")
        super().__init__(hf_ds_config=raw, **options)
        if steps_per_print not in (None, "auto"):
            # accelerate's plugin always silences DeepSpeed; hf_zero prints on rank 0 only, and only on request.
            self.deepspeed_config["steps_per_print"] = steps_per_print

    def _deepspeed_config_checks(self) -> None:
        """Accept a configuration in code together with the launcher's settings, with a warning; accelerate's plugin would raise."""
        if not self._config_in_code:
            super()._deepspeed_config_checks()
            return
        answers = sorted(filter(None, os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")))
        if answers:
            warn_once(
                f'ZeroPlugin has its own configuration, so the answers of accelerate config to {", ".join(answers)} only fill "auto" values'
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the plugin's precision to the Accelerator's.

        Raises:
            ConfigError: The plugin was given ``"fp8"``, and the Accelerator has another precision.
        """
        if self.asks_for not in (None, mixed_precision):
            raise ConfigError(
                f"ZeroPlugin: mixed_precision is {self.asks_for!r}, and the Accelerator's is {mixed_precision!r}. Set both to the same "
                "value, or only one; accelerate itself changes fp8 to fp16 on a GPU without products in float8 (before compute "
                "capability 8.9)"
            )
        super().set_mixed_precision(mixed_precision)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether accelerate has to fill a key that is on "auto"; False for keys that the engine computes from the model."""
        return ds_key_long not in _RESOLVED_FROM_MODEL and bool(super().is_auto(ds_key_long))

    def fill_match(self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any) -> None:
        """Fill one ``"auto"`` value if accelerate has a value for it; otherwise leave it to hf_zero's resolver."""
        if ds_key_long not in kwargs and self.get_value(ds_key_long) == "auto":
            return
        super().fill_match(ds_key_long, mismatches, must_match, **kwargs)


class DummyOptim(AccelerateDummyOptim):
    """Declare that the configuration defines the optimizer; accelerate's class of the same name works as well.

    Args:
        params: Parameters or group dicts; a generator is stored as a list, because it is read more than once.
        lr: Value for ``optimizer.params.lr`` if that is ``"auto"``.
        weight_decay: Value for ``optimizer.params.weight_decay`` if that is ``"auto"``.
        **kwargs: Stored in the attribute ``kwargs``, which some callers read.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0.0, **kwargs: Any) -> None:
        super().__init__(list(params), lr=lr, weight_decay=weight_decay, **kwargs)


class DummyScheduler(AccelerateDummyScheduler):
    """Declare that the configuration defines the scheduler; accelerate's class of the same name works as well."""


def _precision_values(mixed_precision: str | None) -> dict[str, Any]:
    if mixed_precision is None:
        return {}
    return {"fp16.enabled": mixed_precision == "fp16", "bf16.enabled": mixed_precision in ("bf16", "fp8")}


def _offload_values(name: str, section: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return one `zero_optimization.offload_*` section as values by dotted key."""
    if section is None:
        return {}
    if not isinstance(section, (str, Mapping)):
        raise ConfigError(
            f"ZeroPlugin: {name} is {section!r}; allowed are {', '.join(map(repr, _DEVICES))} or a section of the configuration"
        )
    settings: dict[str, Any] = {"device": section} if isinstance(section, str) else dict(section)
    _check(f"{name} device", settings.get("device"), _DEVICES)
    if settings.get("device") == "nvme" and not settings.get("nvme_path"):
        raise ConfigError(f'ZeroPlugin({name}) is "nvme", but no folder is set; give {name}={{"device": "nvme", "nvme_path": "/path"}}')
    return {f"zero_optimization.{name}.{key}": value for key, value in settings.items()}


def _require_own_names(options: Mapping[str, Any]) -> None:
    """Raise for arguments that have another name here than in accelerate's plugin."""
    found = [f"{name} is {_NAMES_OF_ACCELERATE[name]} here" for name in options if name in _NAMES_OF_ACCELERATE]
    if found:
        raise ConfigError(f"ZeroPlugin names arguments differently than accelerate's DeepSpeedPlugin: {', '.join(found)}")


def _check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value is not None and (isinstance(value, bool) or value not in allowed):
        raise ConfigError(f"ZeroPlugin: {name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")


def _check_at_least(name: str, value: float | None, lowest: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < lowest):
        raise ConfigError(f"ZeroPlugin: {name} is {value!r}; a number of at least {lowest} is allowed")
