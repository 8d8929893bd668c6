"""Build the optimizer of the ``optimizer`` section, whose parameters mean the same as in DeepSpeed, and the scheduler of ``scheduler``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler as torch_schedules
from torch.optim.lr_scheduler import LRScheduler

from hf_zero.errors import ConfigError, HfZeroError, UnsupportedError
from hf_zero.native.library import library
from hf_zero.observe import warn_once
from hf_zero.ops import HostAdam, HostLion
from hf_zero.optim.keywords import boolean, nearest, plain_values, unknown_key
from hf_zero.optim.known_classes import refused_reason
from hf_zero.optim.lamb import Lamb
from hf_zero.optim.lion import Lion
from hf_zero.optim.muon import CONFIG_KEYS, muon_from_config
from hf_zero.optim.onebit_adam import BY_ITSELF, OneBitAdam
from hf_zero.optim.schedules import (
    SECTION,
    VALID_LR_SCHEDULES,
    IterationSchedule,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from hf_zero.optim.uncorrected_adam import UncorrectedAdam
from hf_zero.system.planning import DEVICE

_SECTION = "optimizer.params"
OptimizerClass = Callable[..., torch.optim.Optimizer]

# Devices for which every supported torch version has fused kernels.
_FUSED_DEVICES: dict[OptimizerClass, frozenset[str]] = {
    torch.optim.Adam: frozenset({"cpu", "cuda", DEVICE}),
    torch.optim.AdamW: frozenset({"cpu", "cuda", DEVICE}),
    torch.optim.SGD: frozenset({"cpu", "cuda", DEVICE}),
    torch.optim.Adagrad: frozenset({"cpu"}),
    OneBitAdam: frozenset({"cpu", "cuda", DEVICE}),
}

# Lower-case DeepSpeed type -> replacement to suggest.
_REFUSED: dict[str, str] = {
    "onebitlamb": 'use "Lamb", or "OneBitAdam" for few bits on the network',
    "zerooneadam": 'its local steps are not provided; use "OneBitAdam"',
    "muadam": 'build mup\'s MuAdam in code and pass it as optimizer, or use "Adam"',
    "muadamw": 'build mup\'s MuAdamW in code and pass it as optimizer, or use "AdamW"',
    "musgd": 'build mup\'s MuSGD in code and pass it as optimizer, or use "SGD"',
}

# Keys that choose among torch's kernels, and options that only torch's kernels have.
_TORCH_KERNELS = ("foreach", "fused")
_TORCH_ONLY = ("amsgrad", "maximize", "capturable", "differentiable")

# DeepSpeed's own keys of the Adam types, beside those of torch.optim.AdamW.
_ADAM_KEYS = ("torch_adam", "adam_w_mode", "bias_correction", "set_grad_none", "fp32_optimizer_states")
# DeepSpeed's keys without effect here -> the value that is always used, and the reason.
_WITHOUT_EFFECT = {
    "set_grad_none": (True, "gradients are always dropped after a step"),
    "fp32_optimizer_states": (True, "optimizer states have the dtype of the master weights, fp32"),
}
_OWN: dict[str, type[IterationSchedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
_NOT_FROM_JSON = {
    "LRScheduler": "it is a base class",
    "_LRScheduler": "it is a base class",
    "LambdaLR": "its lambda cannot be written in JSON",
    "MultiplicativeLR": "its lambda cannot be written in JSON",
    "SequentialLR": "its schedulers cannot be written in JSON",
    "ChainedScheduler": "its schedulers cannot be written in JSON",
    "ReduceLROnPlateau": "the engine steps schedulers without a metric",
}


def build_optimizer(
    type: str,
    params: Mapping[str, Any] | None,
    param_groups: Sequence[dict[str, Any]] | Sequence[Parameter],
    *,
    device_type: str = "cpu",
    offloaded: bool = False,
    moment_dtype: torch.dtype | None = None,
    matrices: Callable[[], set[int]] = set,
) -> torch.optim.Optimizer:
    """Build the optimizer of the ``optimizer`` section.

    ``"Adam"`` is AdamW unless ``adam_w_mode`` is false; as in DeepSpeed, neither decays weights by default. With ``torch_adam`` the
    other ``params`` go to torch's class, whose own defaults then hold (AdamW's weight decay of 0.01). Without it, on a CPU with native
    kernels, Adam and Lion are ``hf_zero.ops`` classes that compute the same numbers.

    Args:
        type: Adam, AdamW, Lion, Adagrad, SGD, Lamb, Muon or another class of ``torch.optim``; letter case is ignored.
        params: ``optimizer.params``; numbers may be text. A parameter that is missing or None keeps the class' default.
        param_groups: Parameters, or group dicts whose own options win over ``params``.
        device_type: Device on which the optimizer will run. Torch's fused kernels are used where they exist for it, else its foreach
            kernels; ``fused`` and ``foreach`` in ``params`` take precedence.
        offloaded: The optimizer will run in host memory, wherever the parameters are now.
        moment_dtype: fp32 or bf16, for the moments of Adam and Lion over bf16 masters in host memory. Torch's classes keep moments in the
            masters' dtype, so they are not used where ``moment_dtype`` differs from it. None is fp32 for ``hf_zero.ops``.
        matrices: Function that returns the ids of the parameters that Muon trains; called for the type Muon only.

    Returns:
        An optimizer over the given parameters, with one group per given group.

    Raises:
        ConfigError: The type or a parameter is unknown, a value is out of its range, or there are no parameters at all.
        UnsupportedError: The type or an option needs all tensors together, or is not provided.
    """
    groups = list(param_groups)
    if not groups:
        raise ConfigError(f"optimizer.type {type!r} got no parameters: every parameter of the model is frozen.")
    name = str(type).lower()
    _refuse_type(type)
    values = _plain(name, params or {})
    chosen_torch = boolean(f"{_SECTION}.torch_adam", values.get("torch_adam", False))
    if name == "muon":
        return _build_muon(values, groups, matrices())
    kind, values = _resolve(type, values)
    allowed = _keywords(kind)
    for key in values:
        if key not in allowed:
            raise unknown_key(_SECTION, key, _allowed_names(name, allowed), str(type))
    if (offloaded or device_type == "cpu") and not chosen_torch:
        kind, values = _native_kind(kind, values, groups, moment_dtype, anywhere=offloaded)
    return _construct(kind, values | _fast_path(kind, values, groups, device_type), groups)


def _plain(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are not None, with text converted to numbers and booleans."""
    given = {key: value for key, value in params.items() if value is not None}
    # "auto" is a value of this one key, not a gap to fill.
    by_itself = name == "onebitadam" and given.get("freeze_step") in BY_ITSELF
    chosen = {"freeze_step": given.pop("freeze_step")} if by_itself else {}
    values = plain_values(_SECTION, given) | chosen
    if "max_grad_norm" in values and name != "onebitadam":
        raise ConfigError(
            f"{_SECTION}.max_grad_norm is not a parameter of any optimizer; write "
            f'"gradient_clipping": {values["max_grad_norm"]!r} at the top level instead.'
        )
    return values


def _resolve(type: str, values: dict[str, Any]) -> tuple[OptimizerClass, dict[str, Any]]:
    """Return the class that a type names, and its keyword arguments."""
    name = str(type).lower()
    if name in ("adam", "adamw"):
        return _resolve_adam(type, values)
    if name == "onebitadam":
        return OneBitAdam, values
    if name in ("lion", "lamb"):
        return (Lion if name == "lion" else Lamb), _drop_without_effect(values)
    kind = _find_torch_class(type)
    return kind, _resolve_adagrad(values) if kind is torch.optim.Adagrad else values


def _resolve_adam(type_name: str, values: dict[str, Any]) -> tuple[OptimizerClass, dict[str, Any]]:
    """Choose the class for Adam or AdamW, and convert DeepSpeed's keys into its keyword arguments."""
    torch_adam = boolean(f"{_SECTION}.torch_adam", values.get("torch_adam", False))
    adam_w_mode = boolean(f"{_SECTION}.adam_w_mode", values.get("adam_w_mode", True))
    bias_correction = boolean(f"{_SECTION}.bias_correction", values.get("bias_correction", True))
    if type_name.lower() == "adamw" and not adam_w_mode:
        warn_once(f'{_SECTION}.adam_w_mode false has no effect on type {type_name!r}; use type "Adam" for Adam\'s weight decay.')
        adam_w_mode = True
    rest = _drop_without_effect(values)
    rest = {key: value for key, value in rest.items() if key not in _ADAM_KEYS}
    if not torch_adam:
        rest.setdefault("weight_decay", 0.0)
    if bias_correction:
        return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam), rest
    if rest.pop("amsgrad", False):
        raise UnsupportedError(
            f"{_SECTION} has bias_correction false and amsgrad true, which are not supported together. Remove one of them."
        )
    rest.pop("fused", None)  # this class has no fused kernel; the numbers are the same
    return UncorrectedAdam, rest | {"decoupled_weight_decay": adam_w_mode}


def _build_muon(values: dict[str, Any], groups: list[Any], matrices: set[int]) -> torch.optim.Optimizer:
    """Return Muon, with AdamW for all parameters that are not hidden matrices."""
    rest = _drop_without_effect(values)
    for key in rest:
        if key not in CONFIG_KEYS:
            raise unknown_key(_SECTION, key, set(CONFIG_KEYS), "Muon")
    if "adam_w_mode" in rest:
        rest["adam_w_mode"] = boolean(f"{_SECTION}.adam_w_mode", rest["adam_w_mode"])
    return muon_from_config(rest, groups, matrices)


def _resolve_adagrad(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` without the keys of DeepSpeed's host Adagrad that torch's Adagrad does not have."""
    rest = _drop_without_effect(values)
    if boolean(f"{_SECTION}.amsgrad", rest.pop("amsgrad", False)):
        raise UnsupportedError(f'{_SECTION}.amsgrad is true, which Adagrad does not have. Drop it, or use type "Adam".')
    return rest


def _drop_without_effect(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` without the keys that have no effect here; warn where the user has set another value than the one used."""
    for key, (held, reason) in _WITHOUT_EFFECT.items():
        if key in values and boolean(f"{_SECTION}.{key}", values[key]) is not held:
            warn_once(f"{_SECTION}.{key} {values[key]!r} has no effect: {reason}.")
    return {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT}


def _torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimizers of ``torch.optim`` that can run here, by name."""
    found = {name: value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    return {
        name: value
        for name, value in found.items()
        if issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer and refused_reason(value) is None
    }


def _refuse_type(type_name: str) -> None:
    """Refuse DeepSpeed types that are not provided, and torch classes that can run at no stage.

    Raises:
        UnsupportedError: The message names a replacement.
    """
    remedy = _REFUSED.get(str(type_name).lower())
    if remedy is not None:
        raise UnsupportedError(f"optimizer.type {type_name!r} is not provided: {remedy}.")
    for name, value in vars(torch.optim).items():
        if name.lower() == str(type_name).lower() and inspect.isclass(value):
            reason = refused_reason(value)
            if reason is not None:
                raise UnsupportedError(
                    f'optimizer.type {type_name!r} cannot run with ZeRO: {reason}. Use "AdamW", "Adam", "Lion" or "SGD".'
                )


def _find_torch_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of ``torch.optim`` with this name, letter case ignored.

    Raises:
        ConfigError: There is no such class.
    """
    classes = _torch_classes()
    for known, value in classes.items():
        if known.lower() == str(name).lower():
            return value
    names = sorted({*classes, "Lamb", "Lion", "Muon", "OneBitAdam"})
    near = nearest(str(name), names)
    hint = f" Did you mean {near!r}?" if near else ""
    raise ConfigError(f"optimizer.type is {name!r}, which is no known optimizer.{hint} Allowed: {', '.join(names)}.")


def _keywords(kind: OptimizerClass) -> set[str]:
    """Return the keyword arguments that a class takes beside its parameters."""
    return set(inspect.signature(kind).parameters) - {"params"}


def _allowed_names(name: str, keywords: set[str]) -> set[str]:
    """Return the names that a user may write for a type: the class' keywords and DeepSpeed's keys."""
    if name in ("adam", "adamw"):
        return (keywords | set(_ADAM_KEYS) | {"amsgrad"}) - {"decoupled_weight_decay"}
    if name in ("lion", "adagrad", "lamb"):
        return keywords | set(_WITHOUT_EFFECT)
    return keywords


def _fast_path(kind: OptimizerClass, values: Mapping[str, Any], groups: Sequence[Any], device_type: str) -> dict[str, bool]:
    """Choose torch's fused or foreach kernels, unless the user chose, or set an option that these kernels exclude."""
    if any(values.get(key) is not None for key in ("fused", "foreach")) or values.get("differentiable"):
        return {}
    devices = _FUSED_DEVICES.get(kind, frozenset())
    tensors = [tensor for group in groups for tensor in _tensors(group)]
    if device_type in devices and all(t.is_floating_point() and t.device.type in devices for t in tensors):
        return {"fused": True}
    return {"foreach": True} if "foreach" in _keywords(kind) else {}


def _native_kind(
    kind: OptimizerClass, values: dict[str, Any], groups: Sequence[Any], moment_dtype: torch.dtype | None, anywhere: bool
) -> tuple[OptimizerClass, dict[str, Any]]:
    """Return the optimizer class over native kernels, if one exists for ``kind``, is available and has all given options; else ``kind``.

    With ``anywhere``, the parameters need not be in host memory now. With ``moment_dtype`` fp32 the kernels are not needed: their
    reference implementation keeps fp32 moments beside 16-bit masters, which torch's classes do not.
    """
    added_values: dict[Any, dict[str, bool]] = {
        torch.optim.Adam: {"decoupled_weight_decay": False},
        torch.optim.AdamW: {"decoupled_weight_decay": True},
        UncorrectedAdam: {"bias_correction": False},
        Lion: {},
    }
    added = added_values.get(kind)
    options = [values, *(group for group in groups if isinstance(group, dict))]
    chooses = any(option.get(key) is not None for option in options for key in _TORCH_KERNELS)
    asks_for_more = chooses or any(option.get(key) for option in options for key in _TORCH_ONLY)
    tensors = [tensor for group in groups for tensor in _tensors(group)]
    fits = all(t.is_floating_point() and (anywhere or t.device.type == "cpu") for t in tensors)
    there = library() is not None or moment_dtype == torch.float32
    if added is None or asks_for_more or not fits or not there:
        return kind, values
    rest = {key: value for key, value in values.items() if key not in (*_TORCH_KERNELS, *_TORCH_ONLY)}
    moments = {} if moment_dtype is None else {"moment_dtype": moment_dtype}
    return HostLion if kind is Lion else HostAdam, rest | added | moments


def _tensors(group: Any) -> list[torch.Tensor]:
    """Return the parameters of a group dict, of a ``(name, parameter)`` pair, or the parameter itself."""
    if isinstance(group, torch.Tensor):
        return [group]
    if isinstance(group, tuple):
        return [group[1]]
    inside = group["params"]
    return [inside] if isinstance(inside, torch.Tensor) else [t for item in inside for t in _tensors(item)]


def _construct(kind: OptimizerClass, values: dict[str, Any], groups: list[Any]) -> torch.optim.Optimizer:
    """Call the class; raise a ``ConfigError`` that shows the section if the class refuses an argument."""
    try:
        return kind(groups, **values)
    except HfZeroError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        shown = {key: value for key, value in values.items() if key not in ("foreach", "decoupled_weight_decay")}
        raise ConfigError(f"{_SECTION} {shown!r} does not fit {getattr(kind, '__name__', kind)}: {error}") from error


def build_scheduler(type: str, params: Mapping[str, Any] | None, optimizer: Any) -> LRScheduler:
    """Build the scheduler of the ``scheduler`` section.

    Args:
        type: One of ``VALID_LR_SCHEDULES`` or a class of ``torch.optim.lr_scheduler``; letter case is ignored.
        params: ``scheduler.params``; numbers may be text.
        optimizer: For hf_zero's schedules any object with live ``param_groups``; torch's need a ``torch.optim.Optimizer``.

    Raises:
        ConfigError: The type is unknown, a parameter is unknown or missing, or a value is out of its range.
        UnsupportedError: The type is a torch class that JSON cannot describe.
    """
    kind = _find_class(type)
    values = dict(params or {})
    signature = inspect.signature(kind)
    allowed = {name: arg for name, arg in signature.parameters.items() if name != "optimizer"}
    for key in values:
        if key not in allowed:
            raise unknown_key(SECTION, key, allowed, kind.__name__)
    required = [name for name, arg in allowed.items() if arg.default is inspect.Parameter.empty]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{kind.__name__} needs {', '.join(f'{SECTION}.{name}' for name in missing)}; give a value.")
    try:
        return kind(optimizer, **plain_values(SECTION, values))
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{SECTION} {values!r} does not fit {kind.__name__}: {error}") from error


def _find_class(name: str) -> Callable[..., LRScheduler]:
    """Return the scheduler class with this name among hf_zero's, then torch's, letter case ignored.

    Raises:
        ConfigError: There is no such class.
        UnsupportedError: JSON cannot describe the class's arguments, or the engine cannot step it.
    """
    torch_names = [key for key in torch_schedules.__all__ if key not in _NOT_FROM_JSON]
    for refused, reason in _NOT_FROM_JSON.items():
        if str(name).lower() == refused.lower():
            raise UnsupportedError(
                f"scheduler.type {name!r} cannot be built from the config: {reason}. Build it in code and pass it as "
                f"lr_scheduler, or use one of: {', '.join(VALID_LR_SCHEDULES)}."
            )
    for known in [*_OWN, *torch_names]:
        if str(name).lower() == known.lower():
            return _OWN.get(known) or getattr(torch_schedules, known)
    near = nearest(str(name), [*_OWN, *torch_names])
    hint = f" Did you mean {near!r}?" if near else ""
    raise ConfigError(
        f"scheduler.type is {name!r}, which is no known scheduler.{hint} Allowed: {', '.join(VALID_LR_SCHEDULES)}, or a "
        f"class of torch.optim.lr_scheduler: {', '.join(sorted(torch_names))}."
    )
