"""Find out which tensors an optimizer reads for one update: single elements, so that it may run on shards; whole parameters; or all
parameters together.

A shard may begin or end inside a tensor. An optimizer that reads a whole tensor (its norm, its rows, its shape) would then compute other
numbers, without any error. It runs where parameters are whole, see [Note: whole tensors]. An optimizer that reads all parameters
together needs them on one rank, as at stage 0; elsewhere it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.core.optimizer.clones import (
    TRIAL_STEPS,
    CollectiveError,
    attributes_read,
    is_mark,
    of_group,
    options_of,
    plain_attributes,
    random_kept,
    random_states,
    trial_data,
    try_steps,
)
from hf_zero.core.optimizer.common_states import states_by_param
from hf_zero.core.optimizer.held_params import describe_other_holders, single_in
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.observe import warn_once
from hf_zero.optim.known_classes import ALL_TENSORS, ELEMENTWISE, REFUSED, WHOLE_TENSOR, named, refused_reason, whole_tensor_reason
from hf_zero.optim.step_reads import require_common_options

_ALLOW_KEY = "zero_allow_untested_optimizer"
# Relative to the largest update. Element-wise kernels differ by rounding only (1e-6 for those that compute in fp32);
# norms and factored moments of halves differ by tens of percent.
_PROBE_TOLERANCE = 1e-4
_RARE_SHAPES = ((160, 192), (4, 3, 3, 3))


def needs_whole_tensors(
    optimizer: torch.optim.Optimizer, allow_untested: bool = False, all_here: bool = False, shards_only: bool = False
) -> bool:
    """Return whether the update of an element depends on other elements of its parameter, but on nothing outside the parameter.

    Classes known to be element-wise, or known not to be, are recognised by exact class or by name. Every other class, subclasses of known
    ones included, is probed. A clone of this optimizer is made in three ways: over a small matrix, over the two
    halves of the flattened matrix as two instances, and over the matrix beside another one. Each is stepped three times with the same
    gradients, and tensor and halves with rare kinds of gradients and shapes too. The optimizer itself and the global random state stay
    untouched.

    Args:
        optimizer: The user's optimizer or the one from the configuration, with any parameters.
        allow_untested: ``zero_allow_untested_optimizer``: a class for which the probe fails or forbids the run is run on whole tensors,
            with a warning.
        all_here: Every rank updates all parameters (stage 0, or one rank), so an optimizer may read all parameters together.
        shards_only: No rank can have whole tensors (tensor parallelism, states in files): with ``allow_untested``, a class for which the
            probe fails runs on flat shards, with a warning.

    Returns:
        False: The optimizer may run on flat shards. True: it needs each parameter in its own shape.

    Raises:
        UnsupportedError: The optimizer reads all parameters together, sends tensors between ranks itself, reads an entry of an option for
            each parameter, or cannot be built for the probe.
    """
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return False
    reason = refused_reason(kind) or (None if all_here else named(kind, ALL_TENSORS))
    if reason is not None:
        raise _refusal(kind, reason)
    _require_no_closure(optimizer)
    require_common_options(optimizer)
    if named(kind, ALL_TENSORS) is not None:
        return True
    if named(kind, WHOLE_TENSOR) is not None:
        if not kind.__module__.startswith(("torch.optim", "hf_zero.")):
            for one, options in _distinct_groups(optimizer):
                _refuse_other_tensors(one, options, all_here)
        return True
    if whole_tensor_reason(kind) is not None or getattr(getattr(optimizer, "args", None), "optim_bits", 32) < 32:
        return True  # bitsandbytes keeps small tensors, such as a probe's, in 32 bits
    held = _holds_parameters(optimizer, all_here, shards_only)
    if _reads_attributes(optimizer, shards_only):
        return True
    undecided = _Undecided(kind, allow_untested, shards_only, all_here)
    answers = [_probe(one, options, undecided, all_here) for one, options in _distinct_groups(optimizer)]
    marked = any(map(is_mark, states_by_param(optimizer).values())) and not shards_only  # a shard has parts of many parameters
    return held or any(answers) or marked


def require_tested(optimizer: torch.optim.Optimizer, allow_untested: bool) -> None:
    """Refuse an optimizer class that is in no table, where the configuration forbids untested classes.

    Raises:
        ConfigError: The class is in no table, and ``zero_allow_untested_optimizer`` is set to false in the configuration.
    """
    kind = type(optimizer)
    known = kind in ELEMENTWISE or any(named(kind, table) for table in (WHOLE_TENSOR, ALL_TENSORS, REFUSED)) or whole_tensor_reason(kind)
    if not (allow_untested or known):
        raise ConfigError(
            f"optimizer {kind.__name__} is not known to run with ZeRO, and {_ALLOW_KEY} is false: leave the key out, and the class is "
            "tried on small tensors first, or set it to true"
        )


def _refusal(kind: type, reason: str) -> UnsupportedError:
    """Return the error for a class that cannot run."""
    stage = " Or use stage 0, where every rank updates all parameters." if refused_reason(kind) is None else ""
    return UnsupportedError(
        f"optimizer {kind.__name__} cannot run with ZeRO: {reason}. The engine updates each parameter separately: use AdamW, Lion, SGD, "
        f"Adafactor, Muon, LAMB or another optimizer that allows it.{stage} {_ALLOW_KEY}, "
        "which accelerate and transformers always set, does not change that."
    )


def _distinct_groups(optimizer: torch.optim.Optimizer) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Return, for each distinct set of options of the groups, a clone with one such group, and the options: they can switch the algorithm
    (GaLore's do).
    """
    distinct: dict[str, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        options = options_of(group)
        # The rate does not change the algorithm, but a rate of 0 (at the start of a warm-up) would make every probe pass.
        for key in ("lr", "initial_lr"):
            if isinstance(options.get(key), (int, float, Tensor)) and float(options[key]) == 0.0:
                options[key] = 1e-2
        distinct.setdefault(repr(sorted(options.items(), key=lambda item: item[0])), (of_group(optimizer, group), options))
    return list(distinct.values())


def _reads_attributes(optimizer: torch.optim.Optimizer, shards_only: bool) -> bool:
    """Return whether the optimizer looks for an attribute that some of its parameters have (``param.lr_mul``), and flat shards have not.

    Raises:
        UnsupportedError: It does, and no rank can have whole tensors.
    """
    named = {name for group in optimizer.param_groups for param in group["params"] for name in plain_attributes(param)}
    if not named:
        return False
    with _trial(optimizer):
        read = [attributes_read(one, options) for one, options in _distinct_groups(optimizer)]
    found = sorted(named.intersection(frozenset[str]().union(*read)))
    if found and shards_only:
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} reads {found[0]!r}, an attribute of parameters of the model, but updates flat shards of "
            "several parameters here (tensor parallelism, states in files): give the value as an option of a param group"
        )
    return bool(found)


def _require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise if ``step`` cannot be called without arguments.

    Raises:
        UnsupportedError: It has a parameter without a default.
    """
    with suppress(ValueError, TypeError):  # no signature
        own = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
        needed = [arg.name for arg in own if arg.default is arg.empty and arg.kind in (arg.POSITIONAL_ONLY, arg.POSITIONAL_OR_KEYWORD)]
        if not needed:
            return
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step() requires {needed[0]!r}, but the engine calls it without arguments, after the loss was "
            f"computed: give {needed[0]} the default None. engine.optimizer.step(closure) calls a closure once before the update"
        )


def _refusal_of_shards(optimizer: torch.optim.Optimizer, held: str) -> UnsupportedError:
    return UnsupportedError(
        f"optimizer {type(optimizer).__name__} {held}, but the engine updates flat shards of several parameters here (tensor parallelism, "
        "states in files): use only self.param_groups and self.state in it"
    )


def _holds_parameters(optimizer: torch.optim.Optimizer, all_here: bool, shards_only: bool) -> bool:
    """Return whether the optimizer has parameters outside of its groups, see [Note: parameters in attributes].

    Raises:
        UnsupportedError: It does, and ranks cannot have whole tensors, or cannot divide an attribute.
    """
    held, name = describe_other_holders(optimizer), type(optimizer).__name__
    if held and shards_only:
        raise _refusal_of_shards(optimizer, held)
    if held and not all_here and (single := single_in(optimizer)):
        raise UnsupportedError(
            f"optimizer {name} {held}, and its attribute {single!r} has values for single parameters, but each rank updates only a part "
            "of the parameters: keep these values in self.param_groups or self.state[param], or use stage 0"
        )
    return bool(held)


@contextmanager
def _trial(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore the global random states after the context; refuse a class whose step sends tensors between ranks itself."""
    with random_kept(optimizer):
        try:
            yield
        except CollectiveError:
            raise UnsupportedError(
                f"optimizer {type(optimizer).__name__} exchanges tensors between ranks inside its step, which divides the work a second "
                "time. Use its version for a single device (SingleDeviceMuon, SingleDeviceMuonWithAuxAdam, ...): the engine divides "
                "parameters over ranks"
            ) from None


def _refuse_other_tensors(optimizer: torch.optim.Optimizer, options: dict[str, Any], all_here: bool) -> None:
    """Try a known class, to refuse it if it communicates or, unless ``all_here``, reads other parameters (LAMB with a global norm).

    Raises:
        UnsupportedError: It does.
    """
    start, grads = trial_data(optimizer)
    start, grads = start.float(), [grad.float() for grad in grads]
    draws, difference, largest = _Draws(start.device), 0.0, 0.0
    # It may need a device, a dtype or a size that the trial does not have.
    with _trial(optimizer), suppress(Exception):
        _, (param,), _ = try_steps(optimizer, options, [start], [grads], watch=draws)
        together, _ = _beside_another(optimizer, options, start, grads, _positions(optimizer, draws))
        whole = param.detach()
        difference, largest = max((whole - one).abs().max().item() for one in together), (whole - start).abs().max().item()
    if not all_here and difference > _PROBE_TOLERANCE * largest:
        raise _reads_all_tensors(type(optimizer), difference, largest)
    if not all_here and draws.found:
        _warn_of_draws(type(optimizer))


def _probe(optimizer: torch.optim.Optimizer, options: dict[str, Any], undecided: _Undecided, all_here: bool) -> bool:
    """Compare the step of one small matrix with steps of its halves, and with the step beside another matrix, under one set of options.

    Args:
        optimizer: A clone with one group.
        options: Options of the group.
        undecided: Decides where the trial does not.
        all_here: See ``needs_whole_tensors``.

    Returns:
        True if the halves differ from the whole, so that the optimizer needs whole tensors.

    Raises:
        UnsupportedError: The optimizer cannot be built or stepped here, or reads more than one tensor at a time.
    """
    start, grads = trial_data(optimizer)
    draws = _Draws(start.device)
    with _trial(optimizer):
        try:
            _, (param,), apart = try_steps(optimizer, options, [start], [grads], watch=draws)
        except Exception:  # a foreign constructor or step may raise any error, perhaps at float64
            start, grads, options = start.float(), [grad.float() for grad in grads], _large_rate(options)
            try:
                _, (param,), apart = try_steps(optimizer, options, [start], [grads], watch=draws)
            except Exception as error:
                return undecided(f"could not be tried on a small matrix: {type(error).__name__}: {error}", error)
        whole = param.detach()
        largest = (whole - start).abs().max().item()
        if largest == 0.0:
            return undecided(f"did not move a small matrix in {TRIAL_STEPS} steps")
        if apart and undecided.shards_only:
            raise _refusal_of_shards(optimizer, f"keeps a tensor for each parameter in {apart}")
        # A few steps do not show all that a rule with random numbers does (a mask over whole parameters). A NaN compares as different.
        alone = not (apart or draws.found)
        alone = alone and _halves_differ_by(optimizer, options, start, grads, whole) <= _PROBE_TOLERANCE * largest
        if all_here and not alone:
            return True
        try:
            together, at_one = _beside_another(optimizer, options, start, grads, (1,) if alone else _positions(optimizer, draws))
        except Exception as error:
            return undecided(f"could not be tried on two small matrices: {type(error).__name__}: {error}", error)
        difference = max((whole - one).abs().max().item() for one in together)
        alone = alone and not any(_halves_differ_on(optimizer, options, *trial) for trial in _rare_trials(start, grads))
    if not difference <= _PROBE_TOLERANCE * largest:
        if not all_here:
            raise _reads_all_tensors(undecided.kind, difference, largest)
        return True
    if draws.found and not all_here:
        _warn_of_draws(undecided.kind)
    if at_one:
        return all_here or undecided.keeps_state_at_one(at_one)
    return not alone


def _beside_another(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], start: Tensor, grads: Sequence[Tensor], positions: Sequence[int]
) -> tuple[list[Tensor], str]:
    """Step the matrix together with another one, once at each of ``positions``: a rule may depend on the position in the group, as
    GrokAdamW's does.

    Returns:
        The matrix after each trial, and a state that the optimizer keeps for one of the two parameters alone ("": none).
    """
    # Its gradients grow: rules like Adam's are blind to a clip factor that two matrices change by the same ratio in all steps.
    other, other_grads = 3.0 * start.flip(0), [7.0 * 3.0**step * grad.flip(0) for step, grad in enumerate(grads)]
    together, at_one = list[Tensor](), set[str]()
    for index in positions:
        starts, both = [other], [other_grads]
        starts.insert(index, start)
        both.insert(index, list(grads))
        built, params, _ = try_steps(optimizer, options, starts, both, first=index)
        together.append(params[index].detach())
        first, second = (set(built.state.get(param, ())) for param in params)
        at_one |= first ^ second
    return together, min(at_one, default="")


def _positions(optimizer: torch.optim.Optimizer, draws: _Draws) -> tuple[int, ...]:
    """Return where a rule for whole tensors is tried beside another matrix: also behind it, unless the matrix would get other random
    numbers there, or another mark of the constructor (APOLLO's seeds), which the engine keeps with its parameter.
    """
    return (0,) if draws.found or states_by_param(optimizer) else (0, 1)


class _Draws(AbstractContextManager[None]):
    """Context around each step of a trial that finds out whether the step draws random numbers.

    Attributes:
        found: Whether a step drew numbers.

    Args:
        device: Device of the trial.
    """

    def __init__(self, device: torch.device) -> None:
        self.found = False
        self._device = device

    def __enter__(self) -> None:
        self._before = random_states(self._device)

    def __exit__(self, *_: object) -> None:
        self.found = self.found or not all(map(torch.equal, self._before, random_states(self._device)))


def _warn_of_draws(kind: type) -> None:
    """Warn once that the results of a class will not be those of plain PyTorch, because its step draws random numbers."""
    warn_once(
        f"step() of optimizer {kind.__name__} draws random numbers. Each rank draws them for the parameters that it updates, so the "
        "weights differ from those of plain PyTorch; at ZeRO stage 0 they are equal"
    )


def _halves_differ_by(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], start: Tensor, grads: Sequence[Tensor], whole: Tensor
) -> float:
    """Return the difference from ``whole`` when the halves of the flattened matrix are stepped as two instances; inf where they cannot
    be stepped.
    """
    middle = start.numel() // 2
    flat, flat_grads = start.flatten(), [grad.flatten() for grad in grads]
    try:
        first = _result(optimizer, options, [flat[:middle]], [[grad[:middle] for grad in flat_grads]])
        second = _result(optimizer, options, [flat[middle:]], [[grad[middle:] for grad in flat_grads]])
    except Exception:  # the optimizer fails on a flat part of a matrix
        return float("inf")
    return (whole.flatten() - torch.cat([first, second])).abs().max().item()


def _rare_trials(start: Tensor, grads: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield other values and gradients: rules that look at a whole tensor in some steps only, or at some shapes, must show here.

    The first gradients become nearly orthogonal to the rows of ``start`` (AdamP and SGDP project such steps). The second grow by steps of
    100 (updates that are clipped by their norm or mean square). The other trials have a matrix that is large enough to be factored, and
    a convolution's weight; the halves of every trial are vectors.
    """
    rows = start / start.norm(dim=1, keepdim=True)
    across = [grad - (grad * rows).sum(1, keepdim=True) * rows for grad in grads[1:]]
    across = [grad + 0.05 / rows.shape[1] ** 0.5 * grad.norm(dim=1, keepdim=True) * rows for grad in across]
    yield start, [0.01 * grad for grad in (grads[0], *across)]
    yield start, [grad * 100.0 ** (step - 1) for step, grad in enumerate(grads)]
    generator = torch.Generator().manual_seed(1)
    for shape in _RARE_SHAPES:
        values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(start) for _ in range(1 + len(grads))]
        for grad in values[1:]:
            grad.flatten()[grad.numel() // 2 :] *= 10.0  # in place: the gradient is contiguous
        yield values[0], values[1:]


def _halves_differ_on(optimizer: torch.optim.Optimizer, options: dict[str, Any], start: Tensor, grads: Sequence[Tensor]) -> bool:
    """Return whether the halves of the flattened matrix move otherwise than the matrix, which may also fail on these gradients."""
    try:
        whole = _result(optimizer, options, [start], [grads])
    except Exception:  # whole tensors are right for element-wise optimizers too
        return True
    difference = _halves_differ_by(optimizer, options, start, grads, whole)
    return not difference <= _PROBE_TOLERANCE * (whole - start).abs().max().item()  # true for NaN


def _large_rate(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a learning rate that moves float32 values by more than their rounding; the algorithm stays the same."""
    rate = options.get("lr")
    return {**options, "lr": 1e-2} if isinstance(rate, float) and 0.0 < rate < 1e-2 else options


@dataclass(frozen=True)
class _Undecided:
    """Decision about a class for which the probe is inconclusive.

    Attributes:
        kind: The optimizer's class.
        allowed: The class may run: on whole tensors, which are right for element-wise optimizers too.
        shards_only: No rank has whole tensors, so the class runs on flat shards.
        all_here: Every rank has all parameters whole, which is right for every class.
    """

    kind: type
    allowed: bool
    shards_only: bool
    all_here: bool

    def __call__(self, problem: str, cause: Exception | None = None) -> bool:
        """Warn, and return whether the optimizer runs on whole tensors.

        Raises:
            UnsupportedError: The class may not run; ``problem`` is the reason.
        """
        name = self.kind.__name__
        if self.all_here and not self.shards_only:
            return True
        if not self.allowed:
            raise UnsupportedError(
                f'optimizer {name} is not known to treat parameters one by one and {problem}. If it does, set "{_ALLOW_KEY}": true.'
            ) from cause
        if self.shards_only:
            warn_once(f"optimizer {name} {problem}; with {_ALLOW_KEY} it runs on flat shards, which is right if it is element-wise")
        else:
            warn_once(f"optimizer {name} {problem}; each parameter is updated whole, by one rank")
        return not self.shards_only

    def keeps_state_at_one(self, name: str) -> bool:
        """Warn that the optimizer keeps the state ``name`` for the first parameter of several alone; return True.

        Raises:
            UnsupportedError: The class may not run.
        """
        problem = f"it keeps the state {name!r} for one of several equal parameters, but each rank updates some of them"
        if not self.allowed:
            raise UnsupportedError(
                f"optimizer {self.kind.__name__} cannot run with ZeRO: {problem}. Keep it in a param group, in an attribute, or as "
                f'self.state["k"], or use stage 0. Or set "{_ALLOW_KEY}": true to run it anyway; then it counts by rank'
            )
        warn_once(f"optimizer {self.kind.__name__}: {problem}; with {_ALLOW_KEY} each rank keeps one for its own first parameter")
        return not self.shards_only


def _reads_all_tensors(kind: type, difference: float, update: float) -> UnsupportedError:
    """Return the error for a class that updates a matrix otherwise when another one is in its group.

    Args:
        kind: The class.
        difference: Largest difference of an element, after the steps of a trial.
        update: Largest change of an element in these steps.
    """
    problem = (
        f"after {TRIAL_STEPS} steps a matrix beside another one differs by {difference:.3g} from the matrix alone (update {update:.3g}), "
        "so it depends on all parameters together or on their positions"
    )
    return _refusal(kind, problem)


def _result(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor]], index: int = 0
) -> Tensor:
    """Return parameter ``index`` of a trial: a new optimizer steps over copies of ``starts``, once with each of ``grads``."""
    return try_steps(optimizer, options, starts, grads, first=index)[1][index].detach()


def check_whole_tensors(inner: torch.optim.Optimizer, split: bool, offload_device: str) -> None:
    """Refuse combinations under which no rank has a whole parameter, or the state would not be on the configured device.

    Args:
        inner: An optimizer that needs whole tensors.
        split: Several ranks hold one model together (tensor parallelism).
        offload_device: `zero_optimization.offload_optimizer.device`.

    Raises:
        UnsupportedError: Tensor parallelism, or ``offload_optimizer`` to files.
    """
    kind = type(inner).__name__
    bits = getattr(getattr(inner, "args", None), "optim_bits", 8)
    reason = whole_tensor_reason(type(inner), bits) or "it looks at whole parameters"
    if split:
        raise UnsupportedError(
            f"optimizer {kind} with tensor parallelism is not provided: {reason}, and each rank of a group has a slice. Use an "
            "element-wise optimizer (torch.optim.AdamW, SGD ...), or data parallelism alone"
        )
    if offload_device == "nvme":
        raise UnsupportedError(
            f"optimizer {kind} with zero_optimization.offload_optimizer.device nvme is not provided: {reason}, and files hold states of "
            "flat shards. Set the device to cpu or none, or use an element-wise optimizer (torch.optim.AdamW, SGD ...)"
        )
