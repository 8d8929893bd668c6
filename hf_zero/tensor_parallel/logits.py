"""Logits of which each rank holds a part of the vocabulary, and the cross-entropy computed over the parts.

[Note: vocabulary-parallel loss] A model's head that is split over the vocabulary returns ``VocabularyLogits``, with the shape of the whole
logits and the values of this rank's part. Three kinds of operation work on the parts: element-wise ones, views and slices that keep the
vocabulary whole, and ``torch.nn.functional.cross_entropy`` (which transformers' losses call). Any other reader gets the gathered logits.
The loss over the parts follows Megatron-LM (Shoeybi et al. 2019): maximum and sum of exponentials are reduced over the ranks, so that the
whole logits (rows x vocabulary, in fp32 often the largest tensor of a training step) never exist.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from hf_zero.errors import StateError
from hf_zero.tensor_parallel import functions
from hf_zero.tensor_parallel.functions import ModelGroup, Part

_POINTWISE = {
    "float", "double", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone", "detach", "neg", "abs", "exp", "tanh", "sigmoid",
    "div", "true_divide", "__truediv__", "mul", "multiply", "__mul__", "__rmul__", "add", "__add__", "__radd__", "sub", "__sub__", "clamp",
}  # fmt: skip
_VIEWS = {"view", "reshape", "flatten", "unsqueeze", "squeeze"}
_METADATA = {"size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "stride", "ndimension", "get_device"}


class VocabularyLogits(torch.Tensor):
    """Tensor with the shape of the whole logits and the values of a part of the vocabulary; [Note: vocabulary-parallel loss].

    Attributes:
        local: This rank's part; its last dimension is smaller.
        group: The ranks that hold the vocabulary together.
        part: Indices of the vocabulary that each rank holds.
        label: Label of the collectives, also for messages.
    """

    local: torch.Tensor
    group: ModelGroup
    part: Part
    label: str
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(cls: Any, local: torch.Tensor, group: ModelGroup, part: Part, label: str) -> VocabularyLogits:
        shape = (*local.shape[:-1], part.full)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device, requires_grad=False)
        self.local, self.group, self.part, self.label, self._whole = local, group, part, label, None
        return self  # type: ignore[no-any-return]

    def __init__(self, *args: Any) -> None:
        """Do nothing: ``__new__`` sets all attributes."""

    def whole(self) -> torch.Tensor:
        """Return the logits of the whole vocabulary, gathered once; collective over the group."""
        if self._whole is None:
            self._whole = functions.gather(self.local, self.group, self.part, self.label)
        return self._whole

    def with_local(self, local: torch.Tensor) -> VocabularyLogits:
        """Return logits whose part on this rank is ``local``."""
        return VocabularyLogits(local, self.group, self.part, self.label)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        """Return a description of shapes, without a collective, because one rank alone may print."""
        return f"VocabularyLogits({tuple(self.local.shape[:-1])} x {self.local.shape[-1]} of {self.part.full} on this rank)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole logits."""
        return self.whole().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        if name == "__get__":
            return _attribute(str(getattr(owner, "__name__", "")), owner, func, args)
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits = args[0] if args and isinstance(args[0], VocabularyLogits) else None
        if logits is not None:
            if name == "register_hook":
                return logits.local.register_hook(*args[1:], **kwargs)
            local = _on_part(name, func, logits, args[1:], kwargs)
            if local is not None:
                return local
        args, kwargs = tree_map_only(VocabularyLogits, lambda found: found.whole(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse calls from C++ code and ``torch.autograd.Function`` that bypass ``__torch_function__``: they would lose gradients."""

        def plain(logits: VocabularyLogits) -> torch.Tensor:
            if logits.local.requires_grad:
                raise StateError(
                    f"{func} reads logits of {logits.label}, of which each rank holds a part of the vocabulary, below autograd: "
                    "pass it logits.whole(), or remove the rule 'vocabulary' for this layer from tensor_parallel.partition_config"
                )
            return logits.whole()

        args, kwargs = tree_map_only(VocabularyLogits, plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def _attribute(name: str, descriptor: Any, func: Any, args: Any) -> Any:
    if name in ("grad_fn", "requires_grad", "is_leaf"):
        return getattr(args[0].local, name)
    if name in ("shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested"):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)
    return descriptor.__get__(args[0].whole())


def _on_part(name: str, func: Any, logits: VocabularyLogits, rest: Any, kwargs: dict[str, Any]) -> Any:
    """Return the function's result where each part can be computed alone; None where it needs the whole logits."""
    if name == "cross_entropy":
        return _loss(logits, *rest, **kwargs)
    if name in _POINTWISE and not any(isinstance(item, torch.Tensor) and item.dim() for item in (*rest, *kwargs.values())):
        return logits.with_local(func(logits.local, *rest, **kwargs))
    if name in _VIEWS and not kwargs.get("dtype"):
        shape = func(torch.empty(logits.shape, device="meta"), *rest, **kwargs).shape
        if len(shape) and shape[-1] == logits.part.full and logits.local.dim() > 0:
            return logits.with_local(logits.local.reshape(*shape[:-1], logits.local.shape[-1]))
    if name == "__getitem__" and _leaves_last(rest[0], logits.dim()):
        return logits.with_local(operator.getitem(logits.local, rest[0]))
    return None


def _leaves_last(index: Any, ndim: int) -> bool:
    """Return whether ``tensor[index]`` of ``ndim`` dimensions keeps the last dimension whole."""
    places = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(place, (list, bool)) for place in places):
        return False
    used = [place for place in places if place is not None]
    after_dots = next((used[position + 1 :] for position, place in enumerate(used) if place is Ellipsis), None)
    if after_dots is not None:
        return not after_dots or after_dots[-1] == slice(None)
    taken = sum(place.dim() if isinstance(place, torch.Tensor) and place.dtype in (torch.bool, torch.uint8) else 1 for place in used)
    return taken < ndim or (taken == ndim and isinstance(used[-1], slice) and used[-1] == slice(None))


def _loss(
    logits: VocabularyLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Compute ``torch.nn.functional.cross_entropy``; return None if it needs whole logits: with class weights, smoothing, or
    probabilities as targets.
    """
    by_class = weight is not None or label_smoothing or size_average is not None or reduce is not None
    if by_class or target.is_floating_point() or logits.dim() > 2:
        return None
    rows = _RowLoss.apply(logits.local, target, logits.group, logits.part, logits.label, ignore_index)
    if reduction == "none":
        return rows
    total = rows.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class _RowLoss(torch.autograd.Function):
    """The loss of each row, 0 for ignored rows; whole on every rank. Backward gives the gradient of this rank's part of the logits."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, target: torch.Tensor, group: ModelGroup, part: Part, label: str, ignored: int
    ) -> torch.Tensor:
        values = local.float()
        highest = group.gather(values.amax(-1), label).amax(0)
        exponentials = (values - highest.unsqueeze(-1)).exp_()
        start, stop = part.ranges[group.rank][0]
        here = (target >= start) & (target < stop) & (target != ignored)
        place = torch.where(here, target - start, 0)
        chosen = torch.where(here, values.gather(-1, place.unsqueeze(-1)).squeeze(-1), 0.0)
        total, chosen = group.sum(torch.stack([exponentials.sum(-1), chosen]), label).unbind()
        counted = target != ignored
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), here, place, counted)
        ctx.dtype = local.dtype
        return torch.where(counted, total.log() + highest - chosen, 0.0).to(local.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        probabilities, here, place, counted = ctx.saved_tensors
        rows = torch.where(counted, grad.float(), 0.0)
        local = probabilities * rows.unsqueeze(-1)
        local.scatter_add_(-1, place.unsqueeze(-1), torch.where(here, -rows, 0.0).unsqueeze(-1))
        return local.to(ctx.dtype), None, None, None, None, None
