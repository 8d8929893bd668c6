"""Wrap the parts of torch without public name that the hooks need; ``tests/core/test_torch_internals.py`` checks each of them."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from hf_zero.core.units.guards import HOOKED_MODULE
from hf_zero.core.units.sharded_parameter import plain_grad_access
from hf_zero.core.units.whole_buffer import ordinary_tensors
from hf_zero.errors import UnsupportedError

# -- torch.func ---------------------------------------------------------------------------------------------------------


_innermost_transform = torch._C._functorch.peek_interpreter_stack


def transforming() -> bool:
    """Return whether a transform of torch.func (``grad``, ``jacrev``, ``vmap``, ...) is running."""
    return _innermost_transform() is not None


def keeps_graph() -> bool:
    """Return whether a graph around the running backward may be differentiated later: by ``create_graph``, or outside of all transforms.

    Transforms always build graphs of their backwards. Code outside of them differentiates these where it records gradients itself.
    """
    for interpreter in torch._C._functorch.get_interpreter_stack() or ():
        if interpreter.key() == torch._C._functorch.TransformType.Grad:
            return bool(torch._C._functorch.CGradInterpreterPtr(interpreter).prevGradMode())
    return torch.is_grad_enabled()


def outside_transforms() -> AbstractContextManager[None]:
    """Return a context in which new tensors are plain ones: inside a transform every new tensor is a wrapper without memory of its own."""
    return torch._C._DisableFuncTorch() if transforming() else nullcontext()


# -- modes ----------------------------------------------------------------------------------------------------------------


_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def outside_recording() -> AbstractContextManager[None]:
    """Return a context that the modes of selective activation checkpointing do not see.

    These modes count the operations of a checkpointed forward, and expect the same ones in its recomputation. Gathers and reshards differ
    between the two. Other modes stay: a plan runs on the tensors of one.
    """
    return _outside_recording() if _modes() and _recorders() else nullcontext()


def _recorders() -> list[TorchDispatchMode]:
    module = sys.modules.get("torch.utils.checkpoint")
    names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    kinds = tuple(getattr(module, name) for name in names if hasattr(module, name))
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, kinds)]


@contextmanager
def _outside_recording() -> Iterator[None]:
    # Modes of the script lie above torch's own, such as that of fake tensors. To enter one again would reset its counts.
    recorders, popped, kept = _recorders(), list[TorchDispatchMode](), 0
    try:
        while not any(mode is recorders[0] for mode in popped):
            popped.append(_pop_mode())
        for mode in reversed(popped):
            if not any(mode is recorder for recorder in recorders):
                _push_mode(mode)
                kept += 1
        yield
    finally:
        for _ in range(kept):
            _pop_mode()
        for mode in reversed(popped):
            _push_mode(mode)


# -- autograd -----------------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Return whether this thread is running a node of a backward."""
    return torch._C._current_graph_task_id() != -1


_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # not in every version of torch


def is_checkpointed() -> bool:
    """Return whether the running forward is under non-reentrant activation checkpointing, and is the one whose tensors are not saved."""
    return _innermost_hooks() == "_checkpoint_hook"


def is_recomputed() -> bool:
    """Return whether non-reentrant activation checkpointing runs the running forward again, for the tensors that were not saved."""
    return _innermost_hooks() == "_recomputation_hook"


def _innermost_hooks() -> str:
    """Return the name of torch's class whose hooks get the tensors that functions save now, if it belongs to checkpointing; else ""."""
    found = _top_hooks(False) if _top_hooks is not None else None
    if found is None or getattr(found[0], "__module__", "") != "torch.utils.checkpoint":
        return ""
    return str(found[0].__qualname__).partition(".")[0]


def call_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the running backward has run all its nodes; must be called from inside a node."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def reaches(params: Iterable[torch.Tensor]) -> bool:
    """Return whether the running backward adds to ``param.grad`` of any of ``params``; call it from hooks of tensors in the graph.

    The result is False in ``torch.autograd.grad``, in transforms of torch.func, and if the graph has none
    of the parameters. Parameters inside a module under reentrant checkpointing are not part of the graph yet.
    """
    return not transforming() and any(_accumulates(param) for param in params if param.requires_grad)


def _accumulates(param: torch.Tensor) -> bool:
    return will_run(torch.autograd.graph.get_gradient_edge(param).node)


def will_run(node: Any) -> bool:
    """Return whether the running backward will run, or has run, ``node`` of the graph; call it from hooks of tensors in the graph."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad with respect to it: the gradient goes to the caller
        return False


def next_node() -> int:
    """Return the number of the next graph node of this thread. Numbers rise, and backward runs nodes with higher numbers first."""
    return int(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]


def number_of(node: Any) -> int:
    """Return the number of a ``grad_fn``."""
    return int(node._sequence_nr())


# -- torch.compile ------------------------------------------------------------------------------------------------------

# Callback of torch.compile for frames of this thread; None if nothing compiles. Some versions of torch do not provide it.
_compiling: Callable[[], Any] | None = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)


def outside_compile(function: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
    """Keep torch.compile, torch.func, inference mode and the modes of selective checkpointing out of a hook.

    torch.compile's machinery is not imported before it is used.

    Args:
        function: The hook.
        module: The module it is a forward hook of.
    """
    wrapped: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal wrapped
        # Any fused optimizer imports the machinery. Its wrapper costs more than most hooks, and has no effect while nothing compiles.
        run = function
        if "torch._dynamo.eval_frame" in sys.modules and (_compiling is None or _compiling() is not None):
            run = wrapped = wrapped or torch.compiler.disable(function)
        # A context costs a microsecond, and hooks are many: this is ``transforming``, without a call.
        if _innermost_transform() is None and not torch.is_inference_mode_enabled() and not _modes():
            return run(*args, **kwargs)
        with outside_transforms(), outside_recording(), ordinary_tensors():
            return run(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    if module is not None:
        setattr(call, HOOKED_MODULE, module)
    # torch.compile of a module that is entered through hooks would compile ``call`` as one frame for all closures.
    frames = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(call.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT))
    return call


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that ``module.compile()`` has put in the place of forward and hooks; None without."""
    call: Callable[..., Any] | None = module._compiled_call_impl
    return None if getattr(call, "_hf_zero_left_out", False) else call


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Set the function that calls of ``module`` run instead of forward and hooks."""
    module._compiled_call_impl = call


def leave_out_of_graphs(module: nn.Module) -> None:
    """Let the graph of a module around ``module`` break there once: the forward and the hooks of ``module`` run as they are written."""
    call = outside_compile(module._call_impl)
    call._hf_zero_left_out = True  # type: ignore[attr-defined]
    module._compiled_call_impl = call


def give_number(handle: RemovableHandle, number: int) -> None:
    """Register a hook under ``number`` in the place of torch's running number, which a graph compares: equal layers then share a graph.

    Args:
        handle: The newest hook of its kind of a module.
        number: Negative, one for each user of this function; torch's numbers are not.
    """
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if hooks is not None and handle.id in hooks:
            hooks[number] = hooks.pop(handle.id)
    handle.id = number


def recompile_limit(functions: int) -> dict[str, int]:
    """Return the option of ``torch.compile`` with which ``functions`` modules of one class are all compiled; empty if torch has none.

    torch compiles one forward 8 times at most and then runs it uncompiled, with a line in its log. Blocks that differ in a number (layers
    that keep keys and values do) need a graph each for training, for evaluation and for another size of batches.
    """
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        return {}
    return {"recompile_limit": max(8, 3 * functions)}


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is the wrapper that ``torch.compile(module)`` returns."""
    machinery = sys.modules.get("torch._dynamo.eval_frame")
    return machinery is not None and isinstance(module, machinery.OptimizedModule)


# -- modules ------------------------------------------------------------------------------------------------------------


def replace_parameters(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Set ``parameters`` as the dict in which ``module`` looks up its own parameters by name."""
    module.__dict__["_parameters"] = parameters


_clear_gradients: Any = nn.Module.zero_grad


def before_zero_grad(function: Callable[[list[nn.Parameter]], Container[int]]) -> None:
    """Call ``function`` before ``zero_grad()`` of any module of this process clears the gradients of its parameters.

    torch has no hook for this. A second call replaces the function.

    Args:
        function: Called with the parameters of the module; returns the ids of those whose gradients stay.
    """

    @wraps(_clear_gradients)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        params = list(self.parameters())
        stays = function(params)
        with plain_grad_access():
            kept = [(param, param.grad) for param in params if id(param) in stays]
            for param, _ in kept:
                param.grad = None
            _clear_gradients(self, set_to_none)
            for param, grad in kept:
                param.grad = grad

    nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]


_CLOSE = 1e-2  # of two norms that are the same number, rounded in 16 bit
_SCALING = next((name for name in vars(clip_grad) if name.startswith("_clip_grad") and name.endswith("_with_norm_")), "")
_scale_gradients: Any = getattr(clip_grad, _SCALING, None)
_total_norm: Any = getattr(clip_grad, "_get_total_norm", None)


def around_clipping(function: Callable[[list[torch.Tensor], float, float, torch.Tensor], float]) -> None:
    """Call ``function`` where ``torch.nn.utils.clip_grad_norm_`` scales gradients, whichever name a script has imported it by.

    torch has no hook for this. A second call replaces the function; versions of torch without these inner functions are left alone.

    Args:
        function: Called with the parameters, the largest norm, the order of the norm and the norm, 0-dim, which it may overwrite; returns
            the loss scale of the gradients that it has clipped, or 0 if it has clipped none. Its norm is checked for
            ``error_if_nonfinite``, as torch checks its own.
    """
    if _scale_gradients is None or _total_norm is None:
        return
    asked: list[tuple[float, bool]] = [(2.0, False)]  # order of the norm that was computed last, and whether it must be finite

    @wraps(_total_norm)
    def total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **kwargs: Any) -> Any:
        asked[0] = float(norm_type), error_if_nonfinite
        return _total_norm(tensors, norm_type, error_if_nonfinite, *args, **kwargs)

    scale_visible = _clip_with_norm_by(function)

    @wraps(_scale_gradients)
    def scale(parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        order, finite = asked[0]
        if not function(params, float(max_norm), order, total_norm):
            scale_visible(params, max_norm, total_norm, *args, **kwargs)
        elif finite and not math.isfinite(total_norm):
            raise RuntimeError(
                f"clip_grad_norm_(error_if_nonfinite=True): the norm of order {order:g} of the sharded gradients is {float(total_norm)}; "
                "call zero_grad() to drop these gradients"
            )

    clip_grad._get_total_norm = total_norm
    setattr(clip_grad, _SCALING, scale)
    for cell in _cells(clip_grad.clip_grad_norm_, "clip_grad_norm_"):
        cell.cell_contents = _asking_torch(cell.cell_contents)


def _cells(decorated: Any, name: str) -> list[Any]:
    """Return the cells in which torch's own decorator keeps the function ``name``, whichever name a script has imported it by; none once
    their function is replaced.
    """
    cells = getattr(decorated, "__closure__", None) or ()
    functions = [(cell, cell.cell_contents) for cell in cells]
    return [cell for cell, inner in functions if getattr(inner, "__name__", "") == name and not hasattr(inner, "__wrapped__")]


def _clip_with_norm_by(function: Callable[[list[torch.Tensor], float, float, torch.Tensor], float]) -> Callable[..., None]:
    """Call ``function`` where a script calls ``torch.nn.utils.clip_grads_with_norm_``, with a norm of the gradients that it could see.

    Returns:
        torch's function, which scales visible gradients.
    """
    usual: Any = _scale_gradients

    def replaced(inner: Callable[..., None]) -> Callable[..., None]:
        @wraps(inner)
        def call(parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            given = total_norm.detach().clone()
            scale = function(params, float(max_norm), 2.0, total_norm)  # visible gradients contain it, and so does a norm of them
            if not scale:
                inner(params, max_norm, total_norm, *args, **kwargs)
            elif given and not any(torch.isclose(given, total_norm * factor, rtol=_CLOSE) for factor in (1.0, scale)):
                raise UnsupportedError(
                    f"torch.nn.utils.clip_grads_with_norm_ was called with the norm {float(given):g}, and that of the gradients, which are "
                    f"sharded, is {float(total_norm):g}: the engine clips by their 2-norm only. Call torch.nn.utils.clip_grad_norm_ instead"
                )

        return call

    for cell in _cells(usual, _SCALING):
        usual, cell.cell_contents = cell.cell_contents, replaced(cell.cell_contents)
    return usual


def around_clipping_by_value(function: Callable[[list[torch.Tensor], float], list[torch.Tensor]]) -> None:
    """Call ``function`` before ``torch.nn.utils.clip_grad_value_`` clips, whichever name a script has imported it by.

    torch has no hook for this. A second call has no effect.

    Args:
        function: Called with the parameters and the largest absolute value; returns the parameters whose gradients torch has to clip.
    """
    for cell in _cells(clip_grad.clip_grad_value_, "clip_grad_value_"):
        cell.cell_contents = _clipping_hidden(cell.cell_contents, function)


def _clipping_hidden(clip: Callable[..., None], function: Callable[..., list[torch.Tensor]]) -> Callable[..., None]:
    @wraps(clip)
    def call(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> None:
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        left = function(params, float(clip_value))
        if left or not params:
            with plain_grad_access():
                clip(left, clip_value, *args, **kwargs)

    return call


def _asking_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which finds gradients as torch has them: it only asks which are there."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with plain_grad_access():
            return function(*args, **kwargs)

    return call
