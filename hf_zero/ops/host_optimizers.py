"""Adam, AdamW, SGD, Lion and Adagrad as ordinary torch optimizers over host memory, with one native pass per parameter.

Their base finds a parameter's group and state, and makes a flat working copy where the kernels need one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_zero.errors import HfZeroError, UnsupportedError
from hf_zero.native.host_updates import AdamRule, adagrad_update, adam_update, lion_update, sgd_update
from hf_zero.native.library import announce
from hf_zero.ops.foreach import require_hyperparameters

# Elements of a 16-bit parameter that are widened to fp32 at a time: 16 MiB for parameters of any size.
_PIECE = 1 << 22


class PassTensors(NamedTuple):
    """Tensors of one pass over one parameter, or over a piece of it.

    Attributes:
        master: The parameter itself, or a working copy.
        low: Tensor that takes a 16-bit copy of the new value; None for none.
        grad_factor: Factor of the gradient; negative in groups that maximise.
        threads: Maximum number of threads.
        elements: The range of the parameter's elements; None is all of them.
    """

    master: Tensor
    grad: Tensor
    low: Tensor | None
    grad_factor: float
    threads: int
    elements: slice | None = None

    def part(self, state: Tensor) -> Tensor:
        """Return the elements of ``state``, a contiguous tensor of the parameter's shape, that belong to ``master``; a view."""
        return state if self.elements is None else state.view(-1)[self.elements]

    def run(self, kernel: Callable[..., None], state: Tensor, **options: Any) -> None:
        """Run the native pass of an optimizer that has one state; ``state`` has only the elements of ``master``."""
        kernel(self.master, self.grad, state, self.low, grad_factor=self.grad_factor, threads=self.threads, **options)


class HostOptimizer(torch.optim.Optimizer):
    """Optimizer whose step is one native pass per parameter; subclasses implement the pass.

    Parameters may have any shape. fp32 parameters in host memory are updated in place. 16-bit parameters, non-contiguous ones and those
    on a device are updated through an fp32 copy or by torch's kernels, with the same arithmetic: a 16-bit parameter is widened, updated in
    fp32 and rounded once, to nearest even, a piece at a time. States are fp32 unless a subclass chooses otherwise.

    Passes use up to ``torch.get_num_threads()`` threads; the result does not depend on their number.
    """

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_factor: float = 1.0,
        lows: Mapping[Tensor, Tensor] | None = None,
    ) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: Function that computes the loss and the gradients.
            grad_factor: Factor of the gradients, applied first in the same pass: unscaling and clipping together.
            lows: For some parameters, a bf16 or fp16 tensor that takes a copy of the new value in the same pass.

        Returns:
            The closure's loss; None without a closure.
        """
        loss = None
        lows = lows or {}
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param, param.grad, lows.get(param), grad_factor)
        return loss

    @torch.no_grad()
    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        lows: Sequence[Tensor | None] | None = None,
        grad_factor: float = 1.0,
        threads: int | None = None,
    ) -> None:
        """Update some of the parameters with given gradients; ``param.grad`` is neither read nor written.

        Several threads may call it at once for different parameters.

        Args:
            params: Parameters of this optimizer.
            grads: One gradient per parameter, fp32, bf16 or fp16, with as many elements; only read.
            lows: One tensor per parameter, bf16 or fp16, that takes a copy of the new value in the same pass; or None.
            grad_factor: Factor of the gradients, applied first: unscaling and clipping together.
            threads: Maximum number of threads per pass, by default ``torch.get_num_threads()``.

        Raises:
            HfZeroError: A tensor is no parameter of this optimizer, or tensors do not fit together.
        """
        groups = {id(param): group for group in self.param_groups for param in group["params"]}
        for param, grad, low in zip(params, grads, lows or [None] * len(params), strict=True):
            if id(param) not in groups:
                raise HfZeroError(f"{type(self).__name__}.update: a tensor of shape {tuple(param.shape)} is not one of its parameters")
            self._update(groups[id(param)], param, grad, low, grad_factor, threads)

    def _update(
        self,
        group: dict[str, Any],
        param: Tensor,
        grad: Tensor,
        low: Tensor | None = None,
        grad_factor: float = 1.0,
        threads: int | None = None,
    ) -> None:
        if grad.is_sparse:
            grad = self._dense(group, param, grad)
        sign = -1.0 if group.get("maximize") else 1.0
        wide = grad.to(param.dtype) if param.dtype == torch.float64 else grad
        whole = PassTensors(param.detach(), wide.detach().contiguous(), low, sign * grad_factor, threads or torch.get_num_threads())
        self._pass(group, param, whole)

    def _dense(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        """Return the sparse gradient ``grad`` as a dense one; a subclass does so if its step changes nothing where a gradient is zero.

        Raises:
            UnsupportedError: Every other optimizer also changes elements whose gradient is zero, so the sparse rows are not enough.
        """
        raise UnsupportedError(
            f"{type(self).__name__} got a sparse gradient for a parameter of shape {tuple(param.shape)}; "
            "build the embedding with sparse=False."
        )

    def _pass(self, group: dict[str, Any], param: Tensor, tensors: PassTensors) -> None:
        """Update ``tensors.master``, the values of ``param``, by the native pass; called by way of ``working_copies``."""
        raise NotImplementedError

    def _state_of(self, param: Tensor, name: str, dtype: torch.dtype = torch.float32, start: float = 0.0) -> Tensor:
        """Return the contiguous state ``name`` of ``param``, of its shape, fp64 or ``dtype``; a new state is filled with ``start``."""
        state = self.state[param]
        if name not in state:
            dtype = torch.float64 if param.dtype == torch.float64 else dtype
            state[name] = torch.full(param.shape, start, dtype=dtype, device=param.device)
        found: Tensor = state[name]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like torch, but keep the dtypes that states have in ``state_dict``: torch rounds the states of a 16-bit parameter to its
        dtype.
        """
        given: list[dict[str, Any]] = []  # the state dict after other load hooks
        handle = self.register_load_state_dict_pre_hook(lambda _, state: given.append(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, saved in zip(self.param_groups, given[0]["param_groups"], strict=True):
            for param, key in zip(group["params"], saved["params"], strict=True):
                for name, value in given[0]["state"].get(key, {}).items():
                    held = self.state[param][name]
                    if isinstance(value, Tensor) and isinstance(held, Tensor) and held.dtype != value.dtype:
                        self.state[param][name] = value.to(held.device, copy=True)

    def _count_step(self, param: Tensor) -> int:
        """Add 1 to the step of ``param`` and return it, from 1; stored in the form of torch's Adam."""
        state = self.state[param]
        state["step"] = state["step"] + 1 if "step" in state else torch.ones((), dtype=torch.float32)
        return int(state["step"])


def working_copies(whole: PassTensors) -> Iterator[PassTensors]:
    """Yield ``whole`` itself where a kernel can update its master in place, else contiguous copies, each written back after its use.

    Args:
        whole: The tensors of one parameter, of any strides and floating-point dtype.

    Yields:
        Tensors with a contiguous fp32 master (fp64 for fp64) on the parameter's device: the whole parameter in its shape, or, for a 16-bit
        parameter, flat pieces of ``_PIECE`` elements.
    """
    value, grad, low = whole.master, whole.grad, whole.low
    if value.dtype in (torch.float32, torch.float64) and value.is_contiguous():
        yield whole
        return
    flat = (
        value.is_contiguous() and grad.numel() == value.numel() and (low is None or (low.is_contiguous() and low.numel() == value.numel()))
    )
    if value.numel() <= _PIECE or not flat:
        yield from _written_back(whole, value)
        return
    for start in range(0, value.numel(), _PIECE):
        elements = slice(start, min(start + _PIECE, value.numel()))
        piece = whole._replace(grad=grad.view(-1)[elements], low=None if low is None else low.view(-1)[elements], elements=elements)
        yield from _written_back(piece, value.view(-1)[elements])


def _written_back(tensors: PassTensors, value: Tensor) -> Iterator[PassTensors]:
    """Yield ``tensors`` with a contiguous fp32 or fp64 copy of ``value`` as their master; write the copy back to ``value`` at the end."""
    wide = (value if value.dtype == torch.float64 else value.float()).contiguous()
    yield tensors._replace(master=wide)
    value.copy_(wide)


class HostAdam(HostOptimizer):
    """Adam or AdamW for parameters in host memory; bit for bit ``torch.optim.AdamW(fused=True)`` on whole vectors of fp32.

    States are ``step``, ``exp_avg`` and ``exp_avg_sq``, like torch's, so a ``state_dict`` of one loads into the other.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights.
        decoupled_weight_decay: True is AdamW; False is Adam, which adds the decay to the gradient.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        moment_dtype: ``torch.float32``, or ``torch.bfloat16``, which halves the state. Increments of a bf16 moment below 1/512 of it are
            lost, so with ``betas[1]`` of 0.99 and more the second moment stops following slow changes.

    Raises:
        ValueError: A hyper-parameter out of its range.
        UnsupportedError: A group has ``amsgrad``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        require_hyperparameters(lr, betas, weight_decay)
        if eps < 0:
            raise ValueError(f"eps is {eps!r}; it must be at least 0")
        if moment_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moment_dtype is {moment_dtype}; it must be torch.float32 or torch.bfloat16")
        announce()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)
        self.moment_dtype = moment_dtype
        for group in self.param_groups:  # groups of a former torch optimizer keep its flags
            if group.get("amsgrad"):
                raise UnsupportedError(f"{type(self).__name__} has no amsgrad; use torch.optim.AdamW(..., amsgrad=True)")

    def _pass(self, group: dict[str, Any], param: Tensor, tensors: PassTensors) -> None:
        dtype = self._moment_dtype_of(param)
        exp_avg, exp_avg_sq = self._state_of(param, "exp_avg", dtype), self._state_of(param, "exp_avg_sq", dtype)
        rule = AdamRule(
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            bias_correction=group["bias_correction"],
            step=self._count_step(param),
            grad_factor=tensors.grad_factor,
        )
        for piece in working_copies(tensors):
            adam_update(piece.master, piece.grad, piece.part(exp_avg), piece.part(exp_avg_sq), piece.low, rule, piece.threads)

    def _moment_dtype_of(self, param: Tensor) -> torch.dtype:
        return param.dtype if param.dtype == torch.float64 else self.moment_dtype


class HostSGD(HostOptimizer):
    """SGD with momentum for parameters in host memory, with torch's arguments, state (``momentum_buffer``) and numbers.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        momentum: Decay of the buffer. Without momentum ``torch.optim.SGD(fused=True)`` moves less memory.
        dampening: The gradient enters the buffer times ``1 - dampening``.
        weight_decay: Decay added to the gradient.
        nesterov: Step by the gradient and the momentum to come.

    Raises:
        ValueError: A hyper-parameter out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        require_hyperparameters(lr, (0.0, 0.0), weight_decay)
        if momentum < 0:
            raise ValueError(f"momentum is {momentum!r}; it must be at least 0")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(f"nesterov needs momentum above 0 (it is {momentum!r}) and dampening 0 (it is {dampening!r})")
        announce()
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)

    def _pass(self, group: dict[str, Any], param: Tensor, tensors: PassTensors) -> None:
        first = "momentum_buffer" not in self.state[param]
        momentum_buffer = self._state_of(param, "momentum_buffer")
        options = {name: group[name] for name in ("momentum", "dampening", "weight_decay", "nesterov")}
        for piece in working_copies(tensors):
            piece.run(sgd_update, piece.part(momentum_buffer), lr=float(group["lr"]), first=first, **options)


class HostLion(HostOptimizer):
    """Lion with decoupled weight decay for parameters in host memory; arguments and numbers of ``hf_zero.optim.lion.Lion``.

    It has one state, ``exp_avg``.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        betas: Interpolation of the update, decay of the momentum.
        weight_decay: Decoupled weight decay.
        moment_dtype: ``torch.float32``, or ``torch.bfloat16``, which halves the state; it is widened for a step and rounded once, to
            nearest even.

    Raises:
        ValueError: A hyper-parameter out of its range, or another moment type.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        require_hyperparameters(lr, betas, weight_decay)
        if moment_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moment_dtype is {moment_dtype}; it must be torch.float32 or torch.bfloat16")
        self.moment_dtype = moment_dtype
        announce()
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _pass(self, group: dict[str, Any], param: Tensor, tensors: PassTensors) -> None:
        exp_avg = self._state_of(param, "exp_avg", self.moment_dtype)
        for piece in working_copies(tensors):
            moment = piece.part(exp_avg)
            wide = moment if moment.dtype == piece.master.dtype else moment.to(piece.master.dtype)
            piece.run(lion_update, wide, lr=float(group["lr"]), betas=group["betas"], weight_decay=group["weight_decay"])
            if wide is not moment:
                moment.copy_(wide)


class HostAdagrad(HostOptimizer):
    """Adagrad for parameters in host memory, with torch's arguments, states (``step``, ``sum``) and numbers, also for sparse gradients.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        lr_decay: The rate of step ``t`` is ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: Decay added to the gradient.
        initial_accumulator_value: Initial value of ``sum``.
        eps: Added to the root of ``sum``.

    Raises:
        ValueError: A hyper-parameter out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        require_hyperparameters(lr, (0.0, 0.0), weight_decay)
        for name, value in (("lr_decay", lr_decay), ("initial_accumulator_value", initial_accumulator_value), ("eps", eps)):
            if value < 0:
                raise ValueError(f"{name} is {value!r}; it must be at least 0")
        announce()
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def _dense(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        if group["weight_decay"] or not group["eps"]:
            return super()._dense(group, param, grad)
        return grad.to_dense()  # a gradient of zero changes neither the sum nor the value

    def _pass(self, group: dict[str, Any], param: Tensor, tensors: PassTensors) -> None:
        total = self._state_of(param, "sum", start=group["initial_accumulator_value"])
        lr = float(group["lr"]) / (1 + (self._count_step(param) - 1) * group["lr_decay"])
        for piece in working_copies(tensors):
            piece.run(adagrad_update, piece.part(total), lr=lr, eps=group["eps"], weight_decay=group["weight_decay"])
