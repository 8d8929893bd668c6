"""Which optimizers may run on shards: those that update every element by itself.

A shard cuts through tensors wherever the rank's range ends. An optimizer that looks at a whole tensor (its norm, its rows,
its shape) or at all tensors together would compute something else on every rank, without any error.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedError
from hf_zero.ops import HostAdagrad, HostAdam, HostLion, HostSGD
from hf_zero.optim.lion import Lion
from hf_zero.optim.onebit_adam import OneBitAdam
from hf_zero.optim.uncorrected_adam import UncorrectedAdam

_ALLOW_KEY = "zero_allow_untested_optimizer"
_PROBE_SHAPE = (4, 6)
_PROBE_STEPS = 3
# Relative to the largest update. Element-wise kernels differ by rounding only (1e-6 for those that compute in fp32);
# norms and factored moments of halves differ by tens of percent.
_PROBE_TOLERANCE = 1e-4

_ELEMENTWISE: frozenset[type] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        HostAdagrad,
        HostAdam,
        HostLion,
        HostSGD,
        Lion,
        OneBitAdam,
        UncorrectedAdam,
    }
)

# Lower-case class name -> what it needs. Names rather than classes, so that no third party is imported to refuse it.
WHOLE_TENSOR: dict[str, str] = {
    "adafactor": "it factors the second moment into rows and columns of whole matrices",
    "came": "it factors the second moment into rows and columns of whole matrices",
    "distributedshampoo": "it preconditions whole matrices",
    "shampoo": "it preconditions whole matrices",
    "soap": "it preconditions whole matrices",
    "muon": "it orthogonalises whole matrices",
    "muonwithauxadam": "it orthogonalises whole matrices",
    "lamb": "it scales each update by the norms of the whole parameter",
    "fusedlamb": "it scales each update by the norms of the whole parameter",
    "lars": "it scales each update by the norms of the whole parameter",
    "fusednovograd": "it keeps one second moment per whole parameter",
    "novograd": "it keeps one second moment per whole parameter",
    "adam_mini": "it keeps one second moment per block of a whole parameter",
    "adammini": "it keeps one second moment per block of a whole parameter",
    "lbfgs": "it takes inner products over all parameters and evaluates the loss several times a step",
    "sparseadam": "it needs sparse gradients, and flat units have dense ones",
    "prodigy": "it estimates its step size from norms over all parameters",
    "dadaptadam": "it estimates its step size from norms over all parameters",
    "dadaptsgd": "it estimates its step size from norms over all parameters",
    "galoreadamw": "it projects whole gradient matrices",
    "galoreadafactor": "it projects whole gradient matrices",
    "apolloadamw": "it projects whole gradient matrices",
    "lomo": "it updates parameters inside backward, before gradients are reduced",
    "adalomo": "it updates parameters inside backward, before gradients are reduced",
}
_QUANTIZED = "it quantizes its state in blocks that shards cut through"
_QUANTIZED_SUFFIXES = ("8bit", "4bit", "fp8")


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Returns when the optimizer's update of an element depends on that element alone; raises otherwise.

    Classes known to be element-wise pass and known others are refused, by exact class or by name. Every other class,
    subclasses of known ones included, is probed: built anew with this optimizer's hyper-parameters, once over a small
    matrix and once, as two instances, over the flattened matrix' halves, and stepped three times with the same gradients.
    The optimizer itself and the global random state stay untouched.

    Args:
        optimizer: the client's or the config's optimizer, with any parameters.

    Raises:
        UnsupportedError: when it needs whole tensors, or cannot be built for the probe.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE:
        return
    reason = whole_tensor_reason(kind)
    if reason is not None:
        raise _refusal(kind, reason, f"{_ALLOW_KEY}, which accelerate and transformers always set, does not change that.")
    if getattr(getattr(optimizer, "args", None), "optim_bits", 32) < 32:  # bitsandbytes: small probes would stay 32-bit
        raise _refusal(kind, _QUANTIZED)
    for group in _distinct_groups(optimizer):
        _probe(optimizer, group)


def whole_tensor_reason(kind: type) -> str | None:
    """Returns why a class is known not to be element-wise, or None when it is not known so."""
    for ancestor in kind.__mro__:
        name = ancestor.__name__.lower()
        if name in WHOLE_TENSOR:
            return WHOLE_TENSOR[name]
        if name.endswith(_QUANTIZED_SUFFIXES):
            return _QUANTIZED
    return None


def _refusal(kind: type, reason: str, switch: str = "") -> UnsupportedError:
    """The error for a class that needs whole tensors. ``switch``: what the key that allows untested classes does for it."""
    switch = switch or f'Or set "{_ALLOW_KEY}": true to run it anyway on flat shards, with other results than on one process.'
    return UnsupportedError(
        f"optimizer {kind.__name__} cannot run on ZeRO shards: {reason}. Use an element-wise optimizer (AdamW, Adam, Lion, "
        f"SGD, Adagrad, RMSprop ...). {switch}"
    )


def _distinct_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups' options without parameters, each different set once: options can switch the algorithm (GaLore's do)."""
    distinct: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        # The rate does not change the algorithm, but one of 0 (a warm-up that has begun) would make every probe pass.
        for key in ("lr", "initial_lr"):
            if isinstance(options.get(key), (int, float, Tensor)) and float(options[key]) == 0.0:
                options[key] = 1e-2
        distinct.setdefault(repr(sorted(options.items(), key=lambda item: item[0])), options)
    return list(distinct.values())


def _probe(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    """Compares one small matrix with its halves under one set of options.

    Raises:
        UnsupportedError: when they differ, or when the class cannot be built or stepped here.
    """
    kind = type(optimizer)
    start, grads = _probe_data(optimizer)
    middle = start.numel() // 2
    flat, flat_grads = start.flatten(), [grad.flatten() for grad in grads]
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _run(optimizer, options, start, grads)
        except Exception as error:  # whatever a foreign constructor or step raises
            raise UnsupportedError(
                f"optimizer {kind.__name__} is not known to be element-wise and could not be tried on a small matrix: "
                f'{type(error).__name__}: {error}. If its update treats every element by itself, set "{_ALLOW_KEY}": true.'
            ) from error
        try:
            halves = torch.cat(
                [
                    _run(optimizer, options, flat[:middle], [grad[:middle] for grad in flat_grads]),
                    _run(optimizer, options, flat[middle:], [grad[middle:] for grad in flat_grads]),
                ]
            )
        except Exception as error:
            raise _refusal(kind, f"it fails on a flat part of a matrix ({type(error).__name__}: {error})") from error
    update = whole.flatten() - flat
    difference = (whole.flatten() - halves).abs().max().item()
    largest = update.abs().max().item()
    if not difference <= _PROBE_TOLERANCE * largest:  # a NaN fails too
        raise _refusal(
            kind,
            f"after {_PROBE_STEPS} steps a matrix and its halves differ by {difference:.3g} (update {largest:.3g})",
        )
    if largest == 0.0:
        raise UnsupportedError(
            f"optimizer {kind.__name__} is not known to be element-wise and did not move a small matrix in {_PROBE_STEPS} "
            f'steps. If its update treats every element by itself, set "{_ALLOW_KEY}": true.'
        )


def _probe_data(optimizer: torch.optim.Optimizer) -> tuple[Tensor, list[Tensor]]:
    """A small matrix (float64, on the optimizer's device) and one gradient per step, whose halves differ in size."""
    device = next((param.device for group in optimizer.param_groups for param in group["params"]), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_PROBE_SHAPE, generator=generator, dtype=torch.float64)
    grads = [torch.randn(_PROBE_SHAPE, generator=generator, dtype=torch.float64) for _ in range(_PROBE_STEPS)]
    for grad in grads:
        grad[_PROBE_SHAPE[0] // 2 :] *= 10.0  # so that a norm over everything differs from the halves' norms
    return start.to(device), [grad.to(device) for grad in grads]


def _run(optimizer: torch.optim.Optimizer, options: dict[str, Any], start: Tensor, grads: list[Tensor]) -> Tensor:
    """Steps a new optimizer of the same class over a copy of ``start``, one gradient per step; returns the result."""
    param = torch.nn.Parameter(start.clone())
    own = copy.deepcopy(options)
    twin = type(optimizer)([{"params": [param], **own}], **_constructor_arguments(type(optimizer), optimizer.defaults))
    train = getattr(twin, "train", None)
    if callable(train):
        train()  # schedule-free optimizers refuse to step before
    for grad in grads:
        param.grad = grad.clone()
        twin.step()
    return param.detach()


def _constructor_arguments(kind: type, defaults: dict[str, Any]) -> dict[str, Any]:
    """The part of ``defaults`` that the constructor names; behind ``**kwargs``, what its base classes name."""
    names: set[str] = set()
    for ancestor in kind.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        parameters = inspect.signature(vars(ancestor)["__init__"]).parameters.values()
        names |= {arg.name for arg in parameters if arg.kind in (arg.POSITIONAL_OR_KEYWORD, arg.KEYWORD_ONLY)}
        if not any(arg.kind is arg.VAR_KEYWORD for arg in parameters):
            break
    return {key: copy.deepcopy(value) for key, value in defaults.items() if key in names}
