"""Make further optimizers of the class of a given one: clones with its attributes, new objects, and trials on small tensors."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero.core.optimizer.step_values import ChangedInPlace, is_foreign

TRIAL_SHAPE = (4, 6)
TRIAL_STEPS = 3
_TRIAL_NUMEL = 16


class CollectiveError(BaseException):
    """Error of a collective inside a trial; a ``BaseException``, so that no ``except Exception`` in another library's ``step`` catches
    it.
    """


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a param group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def nested_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that ``optimizer`` holds in its attributes, also inside lists, tuples and dicts, and those that they hold."""
    found: dict[int, torch.optim.Optimizer] = {}
    waiting: list[Any] = [optimizer]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.optim.Optimizer):
            if id(item) in found:
                continue
            found[id(item)] = item
            waiting += [value for name, value in vars(item).items() if not is_foreign(name)]
        elif type(item) in (list, tuple):
            waiting += [value for value in item if isinstance(value, (torch.optim.Optimizer, list, tuple, dict))]
        elif type(item) is dict:
            waiting += [value for value in item.values() if isinstance(value, (torch.optim.Optimizer, list, tuple, dict))]
    return list(found.values())[1:]


def clone(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any = None, sources: Sequence[dict[str, Any]] | None = None
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and attributes with other groups, which optimizers in its attributes get too.

    Args:
        optimizer: The original.
        groups: The other groups.
        state: State dict of the clone and of optimizers in its attributes; None: each shares that of its original.
        sources: The group of ``optimizer`` that each of ``groups`` stands for; None: all of them, in order.
    """
    others = {id(own): group for own, group in zip(sources or optimizer.param_groups, groups, strict=False)}
    memo: dict[int, Any] = {}

    def cloned(item: Any) -> Any:
        if isinstance(item, torch.optim.Optimizer):
            if id(item) not in memo:
                other = memo[id(item)] = object.__new__(type(item))
                same = item.param_groups is optimizer.param_groups
                own = groups if same else [others[id(group)] for group in item.param_groups if id(group) in others]
                values = {name: value if is_foreign(name) else cloned(value) for name, value in vars(item).items()}
                values.pop("step", None)  # a scheduler that counts calls replaces ``step`` by a method bound to the original
                vars(other).update(values)
                other.param_groups = own
                if state is not None:
                    other.state = state
            return memo[id(item)]
        if type(item) in (list, tuple) and any(isinstance(value, torch.optim.Optimizer) for value in item):
            return type(item)(cloned(value) for value in item)
        if type(item) is dict and any(isinstance(value, torch.optim.Optimizer) for value in item.values()):
            return {key: cloned(value) for key, value in item.items()}
        return item

    made: torch.optim.Optimizer = cloned(optimizer)
    return made


@contextmanager
def unchanged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore what steps of clones inside the ``with`` change in place in attributes and options that they share with ``optimizer``."""
    values = ChangedInPlace([optimizer, *nested_of(optimizer)])
    try:
        yield
    finally:
        values.restore()


def build_anew(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class, with the constructor arguments of ``optimizer`` that its ``defaults`` contain."""
    make: Any = type(optimizer)
    built: torch.optim.Optimizer = make(groups, **_constructor_arguments(make, optimizer.defaults))
    return built


def _constructor_arguments(kind: type, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the part of ``defaults`` that the constructor accepts; for ``**kwargs``, the names that its base classes accept."""
    names: set[str] = set()
    for ancestor in kind.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        parameters = inspect.signature(vars(ancestor)["__init__"]).parameters.values()
        names |= {arg.name for arg in parameters if arg.kind in (arg.POSITIONAL_OR_KEYWORD, arg.KEYWORD_ONLY)}
        if not any(arg.kind is arg.VAR_KEYWORD for arg in parameters):
            break
    return {key: copy.deepcopy(value) for key, value in defaults.items() if key in names}


# -- trials -----------------------------------------------------------------------------------------------------------


def trial_data(optimizer: torch.optim.Optimizer) -> tuple[Tensor, list[Tensor]]:
    """Return a small matrix (float64, on the optimizer's device) and one gradient per step; the two halves of each gradient differ in
    scale.
    """
    device = next((param.device for group in optimizer.param_groups for param in group["params"]), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(TRIAL_SHAPE, generator=generator, dtype=torch.float64)
    grads = [torch.randn(TRIAL_SHAPE, generator=generator, dtype=torch.float64) for _ in range(TRIAL_STEPS)]
    for grad in grads:
        grad[TRIAL_SHAPE[0] // 2 :] *= 10.0  # so that a norm over everything differs from the halves' norms
    return start.to(device), [grad.to(device) for grad in grads]


def try_steps(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    starts: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    kind: type[torch.nn.Parameter] = torch.nn.Parameter,
) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    """Step a new optimizer of the same class over copies of ``starts``, of class ``kind``, with one gradient of each per step.

    It draws from the default random generator, whose state the caller restores.

    Returns:
        The new optimizer and its parameters.

    Raises:
        CollectiveError: The optimizer's step communicates.
    """
    params = [kind(start.clone()) for start in starts]
    with _NoCollectives():
        built = build_anew(optimizer, [{"params": params, **copy.deepcopy(options)}])
        train = getattr(built, "train", None)
        if callable(train):
            train()  # schedule-free optimizers refuse to step without it
        for step in range(TRIAL_STEPS):
            torch.default_generator.manual_seed(step)  # for optimizers that draw random numbers
            for param, own_grads in zip(params, grads, strict=True):
                param.grad = own_grads[step].clone()
            built.step()
    return built, params


def attributes_read(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> frozenset[str]:
    """Return the names of attributes that the optimizer's constructor or step looks for on a parameter (``lr_mul``) and a plain one lacks,
    found by a trial; empty if the class cannot be tried. The caller restores the random state.
    """
    names = set[str]()

    class Watched(torch.nn.Parameter):
        """A parameter that records which attributes it lacks."""

        def __getattr__(self, name: str) -> Any:
            names.add(name)
            raise AttributeError(name)

    start, grads = trial_data(optimizer)
    try:
        try_steps(optimizer, options, [start.float()], [[grad.float() for grad in grads]], Watched)
    except Exception:  # another library's constructor or step may raise any error
        return frozenset()
    return frozenset(name for name in names if not name.startswith("_"))


def plain_attributes(param: Tensor) -> dict[str, Any]:
    """Return the numbers, texts and switches that a script has stored as attributes of ``param`` (``param.lr_mul = 5.0``)."""
    return {
        name: value for name, value in vars(param).items() if name[:1] != "_" and isinstance(value, (bool, int, float, str, type(None)))
    }


class _NoCollectives(TorchDispatchMode):
    """Mode that stops collectives: a trial may run on one rank only, so the other ranks would not take part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise CollectiveError
        return func(*args, **(kwargs or {}))


def state_names(optimizer: torch.optim.Optimizer, group: int, ndim: int) -> frozenset[str] | None:
    """Return the names of the states that the optimizer keeps for a parameter of ``ndim`` dimensions in its group ``group``, found by a
    trial on a small parameter.

    Returns:
        The names, or None if the class cannot be tried. The optimizer itself and the global random state do not change.
    """
    tried = _tried_state(optimizer, group, ndim)
    return None if tried is None else frozenset(tried[0])


def row_names(optimizer: torch.optim.Optimizer, group: int) -> frozenset[str] | None:
    """Return the names of the states of a 1D parameter that have one number per element; None as for ``state_names``."""
    tried = _tried_state(optimizer, group, 1)
    if tried is None:
        return None
    state, param = tried
    return frozenset(name for name, value in state.items() if isinstance(value, Tensor) and value.shape == param.shape)


def _tried_state(optimizer: torch.optim.Optimizer, group: int, ndim: int) -> tuple[dict[str, Any], Tensor] | None:
    """Return the state of a small parameter of ``ndim`` dimensions after some steps, and that parameter; None if the class cannot be
    tried.
    """
    start, grads = trial_data(optimizer)
    shape = (*[1] * (ndim - 2), *TRIAL_SHAPE) if ndim >= 2 else (-1,)
    values = [value.float().view(shape) if ndim else value.float().flatten()[0] for value in (start, *grads)]
    with torch.random.fork_rng(devices=[]):
        try:
            built, (param,) = try_steps(optimizer, options_of(optimizer.param_groups[group]), values[:1], [values[1:]])
        except (Exception, CollectiveError):  # another library's constructor or step may raise any error
            return None
    return dict(built.state.get(param, {})), param


def is_mark(state: dict[str, Any]) -> bool:
    """Return whether a parameter's state is a mark: values that the constructor stored, no tensors and no steps. Moonlight's Muon stores
    ``use_muon`` there, from two lists of parameters that no param group shows.
    """
    return "step" not in state and not any(isinstance(value, Tensor) for value in tree_leaves(state))


def state_at_start(optimizer: torch.optim.Optimizer, group: int, param: Tensor) -> dict[str, Any]:
    """Return the state that the optimizer keeps for ``param`` before the first step; nearly all classes have none, but Adagrad has."""
    with torch.random.fork_rng(devices=[]):
        try:
            options = copy.deepcopy(options_of(optimizer.param_groups[group]))
            return dict(build_anew(optimizer, [{"params": [param], **options}]).state.get(param, {}))
        except Exception:  # another library's constructor may raise any error
            return {}


def state_after_a_step(optimizer: torch.optim.Optimizer, group: int, param: Tensor) -> dict[str, Any]:
    """Return the state that the optimizer keeps for a parameter like ``param`` after one step without a gradient's effect.

    It shows the classes of tensors that the optimizer keeps; ``param`` and the optimizer are not changed.
    """
    twin = torch.nn.Parameter(torch.zeros_like(param))
    twin.grad = torch.zeros_like(twin)
    state: Any = defaultdict(dict)
    options = copy.deepcopy(options_of(optimizer.param_groups[group]))
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"), unchanged(optimizer):
        clone(optimizer, [{**options, "params": [twin]}], state, [optimizer.param_groups[group]]).step()
    return dict(state[twin])


def state_types(optimizer: torch.optim.Optimizer, dtype: torch.dtype, device: torch.device) -> dict[str, torch.dtype]:
    """Return the dtypes of the states that ``optimizer`` keeps with one number per element, by name, found by a trial on a small vector;
    two fp32 states if the trial fails.

    Args:
        optimizer: An optimizer that was never stepped, with any parameters; it is not changed.
        dtype: Dtype of the masters.
        device: Device of the update.
    """
    found: dict[str, torch.dtype] = {}
    for group in optimizer.param_groups:
        vector = torch.nn.Parameter(torch.zeros(_TRIAL_NUMEL, dtype=dtype, device=device))
        vector.grad = torch.zeros_like(vector)
        state: dict[Any, Any] = type(optimizer.state)(dict) if hasattr(optimizer.state, "default_factory") else {}
        try:
            values = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
            trial = clone(optimizer, [{**values, "params": [vector]}], state, [group])
            if optimizer.state:  # made at construction
                trial.state = state = build_anew(optimizer, [{**values, "params": [vector]}]).state
            with unchanged(optimizer):
                trial.step()
        except Exception:  # another library's optimizer may raise any error on a tensor that it was not made for
            return {"state 1": torch.float32, "state 2": torch.float32}
        entries = state[vector].items() if vector in state else ()
        found.update({name: value.dtype for name, value in entries if isinstance(value, Tensor) and value.shape == vector.shape})
    return found
