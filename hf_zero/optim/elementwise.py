"""What an optimizer looks at: single elements, so that it may run on shards; whole tensors; or all tensors together.

A shard cuts through tensors wherever the rank's range ends. An optimizer that looks at a whole tensor (its norm, its rows,
its shape) would compute something else there, without any error; it runs where parameters are whole, see [Note: whole tensors].
One that looks at all tensors together needs them on one rank, which is so at stage 0; else it is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.errors import UnsupportedError
from hf_zero.observe import warn_once
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

# Lower-case class name -> what it needs. Names rather than classes, so that no third party is imported to recognise it.
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
    "galoreadamw": "it projects whole gradient matrices",
    "galoreadafactor": "it projects whole gradient matrices",
    "apolloadamw": "it projects whole gradient matrices",
}
ALL_TENSORS: dict[str, str] = {
    "prodigy": "it estimates its step size from norms over all parameters",
    "dadaptadam": "it estimates its step size from norms over all parameters",
    "dadaptadanip": "it estimates its step size from norms over all parameters",
    "dadaptlion": "it estimates its step size from norms over all parameters",
    "dadaptsgd": "it estimates its step size from norms over all parameters",
}
REFUSED: dict[str, str] = {
    "lbfgs": "it takes inner products over all parameters and evaluates the loss several times a step",
    "sparseadam": "it needs sparse gradients, and flat units have dense ones",
    "lomo": "it updates parameters inside backward, before gradients are reduced",
    "adalomo": "it updates parameters inside backward, before gradients are reduced",
}
_QUANTIZED = "it quantizes its state in blocks of a whole parameter"
_QUANTIZED_SUFFIXES = ("8bit", "4bit", "fp8")


def needs_whole_tensors(
    optimizer: torch.optim.Optimizer, allow_untested: bool = False, all_here: bool = False, shards_only: bool = False
) -> bool:
    """Whether the optimizer's update of an element depends on more than that element, but on nothing outside its parameter.

    Classes known to be element-wise, or known not to be, are told by exact class or by name. Every other class, subclasses of
    known ones included, is probed: built anew with this optimizer's hyper-parameters, over a small matrix, over the flattened
    matrix' halves as two instances, and over the matrix beside another one, and stepped three times with the same gradients.
    The optimizer itself and the global random state stay untouched.

    Args:
        optimizer: The client's or the config's optimizer, with any parameters.
        allow_untested: ``zero_allow_untested_optimizer``: what a probe cannot tell, or tells against, runs on whole tensors with a
            warning.
        all_here: Every rank updates all parameters (stage 0, or one rank), so that an optimizer may look at them together.
        shards_only: No rank can have whole tensors (tensor parallelism, states in files): with ``allow_untested``, what a probe cannot
            tell runs on flat shards with a warning.

    Returns:
        False: it may run on flat shards. True: it needs each parameter in its own shape.

    Raises:
        UnsupportedError: It looks at all parameters together, exchanges tensors between ranks itself, or cannot be built for the probe.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE:
        return False
    reason = refused_reason(kind) or (None if all_here else _named(kind, ALL_TENSORS))
    if reason is not None:
        raise _refusal(kind, reason, f"{_ALLOW_KEY}, which accelerate and transformers always set, does not change that.")
    if _named(kind, ALL_TENSORS) is not None:
        return True
    if _named(kind, WHOLE_TENSOR) is not None:
        if not kind.__module__.startswith(("torch.optim", "hf_zero.")):
            for group in _distinct_groups(optimizer):
                _refuse_talkative(optimizer, group)
        return True
    if whole_tensor_reason(kind) is not None or getattr(getattr(optimizer, "args", None), "optim_bits", 32) < 32:
        return True  # bitsandbytes: tensors as small as a probe's would stay 32-bit
    untold = _Untold(kind, allow_untested, shards_only)
    answers = [_probe(optimizer, group, untold, all_here) for group in _distinct_groups(optimizer)]
    return any(answers)


def state_names(optimizer: torch.optim.Optimizer, group: int, ndim: int) -> frozenset[str] | None:
    """Names of what the optimizer keeps for a parameter of ``ndim`` dimensions in its group ``group``, by trying it on a small one.

    Returns:
        None where the class cannot be tried. The optimizer itself and the global random state stay untouched.
    """
    start, grads = _probe_data(optimizer)
    shape = (*[1] * (ndim - 2), *_PROBE_SHAPE) if ndim >= 2 else (-1,)
    values = [value.float().view(shape) if ndim else value.float().flatten()[0] for value in (start, *grads)]
    with torch.random.fork_rng(devices=[]):
        try:
            twin, param = _stepped(optimizer, _options(optimizer.param_groups[group]), values[:1], [values[1:]])
        except Exception:  # whatever a foreign constructor or step raises
            return None
    return frozenset(twin.state.get(param, {}))


def state_at_start(optimizer: torch.optim.Optimizer, group: int, param: Tensor) -> dict[str, Any]:
    """What the optimizer keeps for ``param`` before the first step; empty for nearly all, not so for Adagrad."""
    with torch.random.fork_rng(devices=[]):
        try:
            return dict(_twin(optimizer, copy.deepcopy(_options(optimizer.param_groups[group])), [param]).state.get(param, {}))
        except Exception:  # whatever a foreign constructor raises
            return {}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def whole_tensor_reason(kind: type) -> str | None:
    """Why a class is known to need whole tensors, or None when it is not known so."""
    return _named(kind, WHOLE_TENSOR) or next(
        (_QUANTIZED for ancestor in kind.__mro__ if ancestor.__name__.lower().endswith(_QUANTIZED_SUFFIXES)), None
    )


def refused_reason(kind: type) -> str | None:
    """Why a class can run nowhere here, or None when nothing is known against it."""
    return _named(kind, REFUSED)


def _named(kind: type, reasons: dict[str, str]) -> str | None:
    names = (ancestor.__name__.lower() for ancestor in kind.__mro__)
    return next((reasons[name] for name in names if name in reasons), None)


def _refusal(kind: type, reason: str, switch: str = "") -> UnsupportedError:
    """The error for a class that cannot run. ``switch``: what the key that allows untested classes does for it."""
    switch = switch or f'Or set "{_ALLOW_KEY}": true to run it anyway, on each rank\'s parameters by themselves, with other results.'
    stage = " Or use stage 0, where every rank updates all parameters." if refused_reason(kind) is None else ""
    return UnsupportedError(
        f"optimizer {kind.__name__} cannot run with ZeRO: {reason}. Each parameter is updated by itself here: use AdamW, Lion, SGD, "
        f"Adafactor, Muon, LAMB or another optimizer that allows it.{stage} {switch}"
    )


def _distinct_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups' options without parameters, each different set once: options can switch the algorithm (GaLore's do)."""
    distinct: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = _options(group)
        # The rate does not change the algorithm, but one of 0 (a warm-up that has begun) would make every probe pass.
        for key in ("lr", "initial_lr"):
            if isinstance(options.get(key), (int, float, Tensor)) and float(options[key]) == 0.0:
                options[key] = 1e-2
        distinct.setdefault(repr(sorted(options.items(), key=lambda item: item[0])), options)
    return list(distinct.values())


def _refuse_talkative(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    """Refuses a known class whose step exchanges tensors between ranks itself; what else it raises on a small matrix is no matter."""
    start, grads = _probe_data(optimizer)
    with torch.random.fork_rng(devices=[]):
        try:
            _run(optimizer, options, [start], [grads])
        except _Talks:
            raise _talkative(type(optimizer)) from None
        except Exception:  # it may want a device, a dtype or a size that the probe does not have
            return


def _probe(optimizer: torch.optim.Optimizer, options: dict[str, Any], untold: _Untold, all_here: bool) -> bool:
    """Compares one small matrix with its halves, and with itself beside another, under one set of options.

    Returns:
        Whether the halves differ from the whole: it needs whole tensors.

    Raises:
        UnsupportedError: It cannot be built or stepped here, or needs more than one tensor at a time.
    """
    kind = type(optimizer)
    start, grads = _probe_data(optimizer)
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _run(optimizer, options, [start], [grads])
        except _Talks:
            raise _talkative(kind) from None
        except Exception:  # whatever a foreign constructor or step raises; perhaps at float64
            start, grads, options = start.float(), [grad.float() for grad in grads], _large_rate(options)
            try:
                whole = _run(optimizer, options, [start], [grads])
            except _Talks:
                raise _talkative(kind) from None
            except Exception as error:
                return untold(f"could not be tried on a small matrix: {type(error).__name__}: {error}", error)
        middle = start.numel() // 2
        flat, flat_grads = start.flatten(), [grad.flatten() for grad in grads]
        update = whole - start
        largest = update.abs().max().item()
        if largest == 0.0:
            return untold(f"did not move a small matrix in {_PROBE_STEPS} steps")
        try:
            first = _run(optimizer, options, [flat[:middle]], [[grad[:middle] for grad in flat_grads]])
            second = _run(optimizer, options, [flat[middle:]], [[grad[middle:] for grad in flat_grads]])
            difference = (whole.flatten() - torch.cat([first, second])).abs().max().item()
        except _Talks:
            raise _talkative(kind) from None
        except Exception:  # it fails on a flat part of a matrix
            difference = float("inf")
        if difference <= _PROBE_TOLERANCE * largest:  # a NaN is not
            return False
        if all_here:
            return True
        other, other_grads = 3.0 * start.flip(0), [7.0 * grad.flip(0) for grad in grads]
        try:
            together = _run(optimizer, options, [start, other], [grads, other_grads])
        except _Talks:
            raise _talkative(kind) from None
        except Exception as error:
            return untold(f"could not be tried on two small matrices: {type(error).__name__}: {error}", error)
    difference = (whole - together).abs().max().item()
    if not difference <= _PROBE_TOLERANCE * largest:
        problem = (
            f"after {_PROBE_STEPS} steps a matrix beside another one differs by {difference:.3g} from the matrix alone (update "
            f"{largest:.3g}), so it looks at all parameters together"
        )
        if not untold.allowed:
            raise _refusal(kind, problem)
        warn_once(f"optimizer {kind.__name__}: {problem}; with {_ALLOW_KEY} it runs on each rank's parameters by themselves")
    return True


def _large_rate(options: dict[str, Any]) -> dict[str, Any]:
    """With a rate that moves float32 by more than its rounding; it does not change the algorithm."""
    rate = options.get("lr")
    return {**options, "lr": 1e-2} if isinstance(rate, float) and 0.0 < rate < 1e-2 else options


@dataclass(frozen=True)
class _Untold:
    """What happens to a class that the probe tells nothing about.

    Attributes:
        kind: The class.
        allowed: It may run: on whole tensors, which are right for element-wise ones too.
        shards_only: There are none: on flat shards.
    """

    kind: type
    allowed: bool
    shards_only: bool

    def __call__(self, problem: str, cause: Exception | None = None) -> bool:
        """Whether it runs on whole tensors.

        Raises:
            UnsupportedError: It may not run.
        """
        name = self.kind.__name__
        if not self.allowed:
            raise UnsupportedError(
                f'optimizer {name} is not known to treat parameters one by one and {problem}. If it does, set "{_ALLOW_KEY}": true.'
            ) from cause
        if self.shards_only:
            warn_once(f"optimizer {name} {problem}; with {_ALLOW_KEY} it runs on flat shards, which is right if it is element-wise")
        else:
            warn_once(f"optimizer {name} {problem}; each parameter is updated whole, by one rank")
        return not self.shards_only


class _Talks(Exception):
    """A collective was issued inside a probe."""


class _Silence(TorchDispatchMode):
    """Stops collectives: a probe runs on one rank, perhaps on not all of them, and the others would not join."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _Talks
        return func(*args, **(kwargs or {}))


def _talkative(kind: type) -> UnsupportedError:
    return UnsupportedError(
        f"optimizer {kind.__name__} exchanges tensors between ranks inside its step, which divides the work a second time. Use its "
        "version for a single device (SingleDeviceMuon, SingleDeviceMuonWithAuxAdam, ...): the engine divides parameters over ranks"
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


def _run(optimizer: torch.optim.Optimizer, options: dict[str, Any], starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]) -> Tensor:
    """Steps a new optimizer of the same class over copies of ``starts``, one gradient each per step; returns the first one's result."""
    return _stepped(optimizer, options, starts, grads)[1].detach()


def _stepped(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> tuple[torch.optim.Optimizer, Tensor]:
    """As ``_run``; returns the new optimizer and its first parameter."""
    params = [torch.nn.Parameter(start.clone()) for start in starts]
    own = copy.deepcopy(options)
    with _Silence():
        twin = _twin(optimizer, own, params)
        train = getattr(twin, "train", None)
        if callable(train):
            train()  # schedule-free optimizers refuse to step before
        for step in range(_PROBE_STEPS):
            torch.default_generator.manual_seed(step)  # for those that draw numbers; the caller restores the state
            for param, own_grads in zip(params, grads, strict=True):
                param.grad = own_grads[step].clone()
            twin.step()
    return twin, params[0]


def _twin(optimizer: torch.optim.Optimizer, options: dict[str, Any], params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """A new optimizer of the same class with one group."""
    make: Any = type(optimizer)
    twin: torch.optim.Optimizer = make([{"params": params, **options}], **_constructor_arguments(make, optimizer.defaults))
    return twin


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
