"""Provide DeepSpeed's functions for gradients that a script holds itself, outside of an engine: norms, clipping, overflow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.comm.back_end import build_collectives
from hf_zero.comm.topology import build_topology
from hf_zero.errors import UnsupportedError


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Scale the ``grad`` of ``parameters`` so that their joint norm is at most ``max_norm``; collective if there is a process group.

    If gradients differ between ranks, the mean of the ranks' norms is used, so that all ranks scale by the same factor. Parameters of an
    engine have a ``param.grad`` at stage 0 only; set ``gradient_clipping`` in the configuration for them.

    Args:
        parameters: Parameters; those without a ``grad`` are skipped.
        max_norm: The largest norm.
        norm_type: Order of the norm; infinity is the largest absolute value.
        mpu: Not supported; must be None.

    Returns:
        The norm before clipping, 0-dim.

    Raises:
        UnsupportedError: ``mpu`` is given.
    """
    _refuse_mpu("clip_grad_norm_", mpu)
    grads = _grads(parameters)
    norm = _mean_over_ranks(_norm(grads, norm_type))
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(grad.device))
    return norm


def get_grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Return the joint norm of all ``param.grad`` on this rank; -1 if one is not finite, as in DeepSpeed."""
    _refuse_mpu("get_grad_norm", mpu)
    return _finite_or_minus_one(_norm(_grads(parameters), norm_type))


def get_weight_norm(parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Return the joint norm of the parameters themselves; -1 if one is not finite, as in DeepSpeed."""
    _refuse_mpu("get_weight_norm", mpu)
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return _finite_or_minus_one(_norm([tensor.detach() for tensor in tensors], norm_type))


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the joint norm from a list of norms; infinity if one of them is not finite."""
    norms = [float(norm) for norm in norm_list]
    return math.sqrt(sum(norm * norm for norm in norms)) if all(math.isfinite(norm) and norm >= 0 for norm in norms) else math.inf


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor],
    norm_type: float = 2,
    mpu: Any = None,
    use_graph: bool = False,
    moe_ep_group: Any = None,
) -> torch.Tensor:
    """Return the norm of all elements of the tensors, 0-dim; -1 if one is not finite, as in DeepSpeed. ``use_graph`` is ignored."""
    _refuse_mpu("get_global_norm_of_tensors", mpu)
    norm = _norm([tensor.detach() for tensor in input_tensors], norm_type)
    return mask_nan_or_inf_with_val_inplace(norm)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: float | torch.Tensor | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
    use_graph: bool = False,
) -> float | torch.Tensor:
    """Scale the tensors in place so that their joint norm (``global_norm`` if given) is at most ``max_norm``; return the norm before."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    factor = max_norm / (float(norm) + eps)
    if 0 <= factor < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(factor)
    return norm


def mask_nan_or_inf_with_val_inplace(input: torch.Tensor, device: Any = None, val: float = -1.0) -> torch.Tensor:
    """Replace non-finite elements by ``val``, in place; return the tensor."""
    return input.masked_fill_(~input.isfinite(), val)


class CheckOverflow:
    """A check for non-finite values in gradients, over all ranks.

    Args:
        param_groups: Lists of parameters whose ``grad`` is checked.
        mpu: Not supported; must be None.
        zero_reduce_scatter: Has no effect.
        deepspeed: Has no effect.

    Raises:
        UnsupportedError: ``mpu`` is given.
    """

    def __init__(
        self,
        param_groups: Sequence[Iterable[torch.Tensor]] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        _refuse_mpu("CheckOverflow", mpu)
        self.params = [param for group in param_groups or () for param in group]

    def check(self, param_groups: Sequence[Iterable[torch.Tensor]] | None = None) -> bool:
        """Return whether any rank has a non-finite value in the gradients; collective if there is a process group."""
        return self.has_overflow(self.params if param_groups is None else [param for group in param_groups for param in group])

    def has_overflow(self, params: Iterable[torch.Tensor], has_moe_params: bool | None = None) -> bool:
        """Return whether any rank has a non-finite value in the gradients of ``params``; collective if there is a process group."""
        return _any_rank(self.has_overflow_serial(params))

    def has_overflow_serial(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether this rank has a non-finite value in the gradients of ``params``; local."""
        return not all(bool(grad.isfinite().all()) for grad in _grads(params))

    def check_using_norm(self, norm_group: Iterable[float], reduce_overflow: bool = True) -> bool:
        """Return whether one of the norms is negative (as ``get_weight_norm`` returns on overflow) or not finite; collective unless
        ``reduce_overflow`` is False.
        """
        found = any(not math.isfinite(norm) or norm < 0 for norm in map(float, norm_group))
        return _any_rank(found) if reduce_overflow else found


def _grads(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    params = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [param.grad.detach() for param in params if param.grad is not None]


def _norm(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    if not tensors:
        return torch.zeros(())
    device = tensors[0].device
    norms = [torch.linalg.vector_norm(tensor, float(norm_type), dtype=torch.float32).to(device) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms), float(norm_type))


def _finite_or_minus_one(norm: torch.Tensor) -> float:
    value = float(norm)
    return value if math.isfinite(value) else -1.0


def _mean_over_ranks(norm: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return norm
    norms = build_collectives(build_topology()).gather_objects(float(norm), "gradient norm")
    return norm.new_tensor(sum(norms) / len(norms))


def _any_rank(found: bool) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return found
    return any(build_collectives(build_topology()).gather_objects(found, "overflow check"))


def _refuse_mpu(what: str, mpu: Any) -> None:
    if mpu is not None:
        raise UnsupportedError(f"{what}(mpu=...) is not provided; an engine whose model is split clips with gradient_clipping")
