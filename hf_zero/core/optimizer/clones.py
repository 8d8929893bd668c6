"""Make further optimizers of the class of a given one: clones with its attributes, new objects, and trials on small tensors."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.random import fork_rng
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero.core.optimizer.common_states import common_states, states_by_param
from hf_zero.core.optimizer.held_params import has_optimizers, nested_of, replace_parameters
from hf_zero.core.optimizer.step_hooks import deferred
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
    of_params = {id(param): others.get(id(own)) for own in sources or optimizer.param_groups for param in own["params"]}
    memo: dict[int, Any] = {}

    def groups_of(item: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
        for own in item.param_groups:
            if id(own) in others:
                yield others[id(own)]
            else:  # see [Note: parameters in attributes]
                group = next((of_params[id(param)] for param in own["params"] if id(param) in of_params), None)
                yield {**options_of(own), "params": group["params"] if group else []}

    def cloned(item: Any) -> Any:
        if isinstance(item, torch.optim.Optimizer):
            if id(item) not in memo:
                other = memo[id(item)] = object.__new__(type(item))
                own = groups if item.param_groups is optimizer.param_groups else list(groups_of(item))
                held = dict(vars(item))  # a copy: in the thread of updates, this may run while the script's thread restores ``step``
                values = {name: value if is_foreign(name) else cloned(value) for name, value in held.items()}
                values.update({name: own for name, value in held.items() if value is item.param_groups})
                values.pop("step", None)  # a scheduler that counts calls replaces ``step`` by a method bound to the original
                vars(other).update(values)
                give(other, "param_groups", own)
                if state is not None:
                    give(other, "state", state)
            return memo[id(item)]
        if not has_optimizers(item):
            return item
        return {key: cloned(value) for key, value in item.items()} if type(item) is dict else type(item)(cloned(value) for value in item)

    made: torch.optim.Optimizer = cloned(optimizer)
    return made


def give(optimizer: torch.optim.Optimizer, name: str, value: Any) -> None:
    """Set an attribute, unless the class has a read-only property of this name: wrappers return that of the optimizer that they hold."""
    found = inspect.getattr_static(type(optimizer), name, None)
    if not isinstance(found, property) or found.fset is not None:
        setattr(optimizer, name, value)


def of_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """Return a clone of ``optimizer`` whose only group is ``group``; it has no other parameters in its attributes either."""
    made = clone(optimizer, [group], sources=[group])
    replace_parameters(made, {id(param): () for other in optimizer.param_groups if other is not group for param in other["params"]})
    return made


def attributes_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the attributes of ``optimizer`` and of the optimizers that it holds."""
    return [dict(vars(one)) for one in (optimizer, *nested_of(optimizer))]


def take_attributes(optimizer: torch.optim.Optimizer, before: Sequence[dict[str, Any]], other: torch.optim.Optimizer) -> None:
    """Set the attributes that ``other``, a clone of ``optimizer``, has changed since ``before``, which ``attributes_of`` has returned."""
    for own, earlier, one in zip([optimizer, *nested_of(optimizer)], before, [other, *nested_of(other)], strict=True):
        groups = earlier.get("param_groups")  # None where a property returns them
        for name, value in vars(one).items():
            is_own = name == "state" or (groups is not None and earlier.get(name) is groups) or has_optimizers(value)
            if not is_own and value is not earlier.get(name):
                setattr(own, name, value)


@contextmanager
def unchanged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore attributes and options of ``optimizer`` that steps of its clones inside the ``with`` change in place."""
    values = ChangedInPlace([optimizer, *nested_of(optimizer)])
    try:
        yield
    finally:
        values.restore()


def build_anew(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class, with the constructor arguments of ``optimizer`` that its ``defaults`` contain, or its
    attributes of the same names.
    """
    make: Any = type(optimizer)
    own = {name: value for name, value in vars(optimizer).items() if not is_foreign(name) and _is_plain(value)}
    built: torch.optim.Optimizer = make(groups, **_constructor_arguments(make, own | optimizer.defaults))
    return built


def _constructor_arguments(kind: type, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the part of ``defaults`` that the constructor accepts; for ``**kwargs``, the names that its base classes accept.

    ``params`` is never part of it.
    """
    names: set[str] = set()
    for ancestor in kind.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        parameters = inspect.signature(vars(ancestor)["__init__"]).parameters.values()
        names |= {arg.name for arg in parameters if arg.kind in (arg.POSITIONAL_OR_KEYWORD, arg.KEYWORD_ONLY)}
        if not any(arg.kind is arg.VAR_KEYWORD for arg in parameters):
            break
    return {key: copy.deepcopy(value) for key, value in defaults.items() if key in names}


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is a number, a text, a switch, or a function."""
    return isinstance(value, (bool, int, float, complex, str, type(None), type, FunctionType))


# -- trials -----------------------------------------------------------------------------------------------------------


def trial_data(optimizer: torch.optim.Optimizer) -> tuple[Tensor, list[Tensor]]:
    """Return a small matrix (float64, on the optimizer's device) and one gradient per step; the two halves of each gradient differ in
    scale.
    """
    device = device_of(optimizer)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(TRIAL_SHAPE, generator=generator, dtype=torch.float64)
    grads = [torch.randn(TRIAL_SHAPE, generator=generator, dtype=torch.float64) for _ in range(TRIAL_STEPS)]
    for grad in grads:
        grad[TRIAL_SHAPE[0] // 2 :] *= 10.0  # so that a norm over everything differs from the halves' norms
    return start.to(device), [grad.to(device) for grad in grads]


def device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Return the device of trials: that of the first parameter, or the CPU."""
    device = next((param.device for group in optimizer.param_groups for param in group["params"]), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def random_kept(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Return a context that restores torch's random states, of the CPU and of the device of trials, at its end."""
    device = device_of(optimizer)
    return fork_rng([]) if device.type == "cpu" else fork_rng([device], device_type=device.type)


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's default generators, of the CPU and of ``device``."""
    states = [torch.default_generator.get_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def trial_step(optimizer: torch.optim.Optimizer) -> None:
    """Call ``step`` of an optimizer that was made for a trial, without the script's hooks on steps, which are for real ones."""
    with ExitStack() as stack:
        for one in (optimizer, *nested_of(optimizer)):
            stack.enter_context(deferred(one))
        optimizer.step()


def try_steps(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    starts: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    kind: type[torch.nn.Parameter] = torch.nn.Parameter,
    first: int = 0,
    watch: AbstractContextManager[object] | None = None,
) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter], str]:
    """Step another optimizer of the same class over copies of ``starts``, of class ``kind``, with one gradient of each per step.

    It is a clone, because arguments of a constructor may be attributes that no option shows; where the constructor has made states of the
    parameters, it is a new object. It draws from the default random generators, whose states the caller restores (``random_kept``).

    Args:
        optimizer: The original, with one param group.
        options: Options of the group.
        starts: Values of the parameters at the beginning.
        grads: The gradients of each parameter.
        kind: Class of the parameters.
        first: Position of the parameter that takes the place of the original's first one in its attributes.
        watch: Entered around each step.

    Returns:
        The other optimizer, its parameters, and the attribute or state in which it kept a tensor of the first one's shape ("": none).

    Raises:
        CollectiveError: The optimizer's step communicates.
    """
    params = [kind(start.clone()) for start in starts]
    with _NoCollectives(), unchanged(optimizer), torch.compiler.set_stance("force_eager"):
        group = {"params": params, **copy.deepcopy(options)}
        if states_by_param(optimizer):
            built = build_anew(optimizer, [group])
        else:
            built = clone(optimizer, [group], defaultdict(dict, copy.deepcopy(common_states(optimizer))), optimizer.param_groups[:1])
            own = optimizer.param_groups[0]["params"]
            tried = [params[first], *params[:first], *params[first + 1 :]]
            replace_parameters(built, {id(param): tried[i : i + 1] if i + 1 < len(own) else tried[i:] for i, param in enumerate(own)})
        train = getattr(built, "train", None)
        if callable(train):
            train()  # schedule-free optimizers refuse to step without it
        for step in range(TRIAL_STEPS):
            torch.default_generator.manual_seed(step)  # for optimizers that draw random numbers
            if starts[0].device.type != "cpu":
                torch.get_device_module(starts[0].device).manual_seed(step)
            for param, own_grads in zip(params, grads, strict=True):
                param.grad = own_grads[step].clone()
            with watch or nullcontext():
                trial_step(built)
        return built, params, _kept_apart(built, params)


def _kept_apart(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> str:
    """Return the place, outside of ``state[param]``, where the optimizer keeps a tensor of the shape of its first parameter: an attribute
    or a container among the states; "" for none.
    """
    for name, value in dict(optimizer.state.get(params[0], ())).items():
        leaves = tree_leaves(value) if not isinstance(value, Tensor) else ()
        if any(isinstance(leaf, Tensor) and leaf.shape == params[0].shape for leaf in leaves):
            return f"state[param][{name!r}]"
    own = {id(param) for param in params}
    for one in (optimizer, *nested_of(optimizer)):
        for name, value in vars(one).items():
            leaves = tree_leaves(value) if not is_foreign(name) and value is not one.param_groups else ()
            if any(isinstance(leaf, Tensor) and id(leaf) not in own and leaf.shape == params[0].shape for leaf in leaves):
                return name
    return ""


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
    with random_kept(optimizer):
        try:
            one = of_group(optimizer, optimizer.param_groups[group])
            built, (param,), _ = try_steps(one, options_of(one.param_groups[0]), values[:1], [values[1:]])
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
    with random_kept(optimizer):
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
    with random_kept(optimizer), torch.compiler.set_stance("force_eager"), unchanged(optimizer):
        trial_step(clone(optimizer, [{**options, "params": [twin]}], state, [optimizer.param_groups[group]]))
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
                trial_step(trial)
        except Exception:  # another library's optimizer may raise any error on a tensor that it was not made for
            return {"state 1": torch.float32, "state 2": torch.float32}
        entries = state[vector].items() if vector in state else ()
        found.update({name: value.dtype for name, value in entries if isinstance(value, Tensor) and value.shape == vector.shape})
    return found
