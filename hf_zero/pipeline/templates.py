"""Shapes of the results of other stages' modules, found by running a copy of the module that has no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_zero.errors import UnsupportedError
from hf_zero.system.planning import plan_ignored, with_values
from hf_zero.system.trees import map_tensors, tensors_in, without_values
from hf_zero.tensor_parallel.trace import answer_function, plain_attention, plain_index, valueless


class _Answers(TorchFunctionMode):
    """Mode in which functions that read values return a made-up value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made_up = answer_function(func, args)
        return made_up[0] if made_up is not None else func(*plain_index(func, args), **plain_attention(func, kwargs))


class Templates:
    """Results of a model's modules without values, by the shapes of their arguments.

    [Note: shapes of a block] A module that returns one tensor, of the shape and type of its first argument, is assumed to do so for other
    sizes too. All other modules are run again for each new size.

    Args:
        skeleton: The whole model without values.
    """

    def __init__(self, skeleton: nn.Module) -> None:
        self._skeleton = skeleton
        self._modules = dict(skeleton.named_modules())
        self._known: dict[tuple[Any, ...], Any] = {}
        self._keeps_shape: set[str] = set()
        self._placeholders: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def follow(self, model: nn.Module) -> None:
        """Adopt the dtypes of ``model``, which an engine may have cast, and its training mode."""
        self._skeleton.train(model.training)
        own = {**dict(self._skeleton.named_parameters()), **dict(self._skeleton.named_buffers())}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in own and own[name].dtype != tensor.dtype:
                with plan_ignored():
                    own[name].data = torch.empty(own[name].shape, dtype=tensor.dtype, device="meta")
                self._known.clear()

    def result(self, path: str, args: Any, kwargs: Any) -> Any:
        """Return the result of a call of the module ``path``, with tensors on the device "meta".

        Raises:
            UnsupportedError: The module does not run without values.
        """
        tensors = tensors_in([args, kwargs])
        if path in self._keeps_shape and (first := next(tensors, None)) is not None:
            return without_values(first[1])
        given = [tensor for _, tensor in tensors]
        key = (path, *((tuple(tensor.shape), tensor.dtype) for tensor in given))
        if key not in self._known:
            with plan_ignored():
                self._known[key] = found = self._run(path, with_values(args), with_values(kwargs))
            alike = isinstance(found, torch.Tensor) and given and (found.shape, found.dtype) == (given[0].shape, given[0].dtype)
            if alike and given[0].dim() > 2:
                self._keeps_shape.add(path)
        return self._known[key]

    def outputs_for(self, path: str, args: Any, kwargs: Any, device: torch.device) -> Any:
        """Return the result of a call of the module ``path`` with placeholders for its tensors; see ``result``."""
        first = args[0] if args else None
        if path in self._keeps_shape and isinstance(first, torch.Tensor):  # nearly all calls
            return self.placeholder(first, device)
        return map_tensors(self.result(path, args, kwargs), lambda meta: self.placeholder(meta, device))

    def placeholder(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a placeholder like the function ``placeholder``, with one shared number per shape and type, since ranks make many."""
        key = like.shape, like.dtype
        if key not in self._placeholders:
            with torch.inference_mode(False):  # training will use the placeholder, too
                self._placeholders[key] = placeholder(like, device)
        return self._placeholders[key].detach()  # a script's hook may set requires_grad

    def _run(self, path: str, args: Any, kwargs: Any) -> Any:
        module = self._modules[path]
        first: Exception | None = None
        for values in (False, True):  # some modules run only with the values of tokens and masks ([Note: values])
            given = map_tensors([args, kwargs], lambda tensor: _shape_only(tensor, values))  # noqa: B023
            try:
                with torch.no_grad(), valueless(_Answers(), None, values):
                    return map_tensors(module.forward(*given[0], **given[1]), without_values)
            except Exception as error:
                first = first or error
        raise UnsupportedError(
            f"pipeline: {path} ({type(module).__name__}) does not run on tensors without values, so a stage that does not hold it cannot "
            f"know the shape of its result ({type(first).__name__}: {first}). Leave pipeline.stages out for this model"
        ) from first


def _shape_only(tensor: torch.Tensor, values: bool) -> torch.Tensor:
    return tensor.cpu() if values and not tensor.is_floating_point() else without_values(tensor)


def placeholder(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor with the shape of ``meta`` for values this rank does not have: one NaN (or 0) expanded, so it takes no memory."""
    value = float("nan") if meta.dtype.is_floating_point else 0
    return torch.full((), value, dtype=meta.dtype, device=device).expand(meta.shape)
