"""Code that optimizer passes share: the check that tensors fit together, and the call of a kernel over thread ranges."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.errors import HfZeroError
from hf_zero.native.library import ELEMENT_TYPES, announce, library

_STATE_TYPES = (torch.float32, torch.bfloat16)
LOW_TYPES = (torch.bfloat16, torch.float16)
"""Dtypes that a pass can write beside the master."""


@dataclass(frozen=True)
class PassTensors:
    """Tensors of one pass: contiguous, of one size, on one device.

    Attributes:
        name: Name of the pass, for messages.
        master: fp32, or fp64 if all other tensors are fp64 too.
        grad: fp32, bf16 or fp16; only read.
        states: One or two tensors; fp32 or bf16, all of one dtype.
        low: bf16 or fp16 copy to write, or None.
    """

    name: str
    master: Tensor
    grad: Tensor
    states: tuple[Tensor, ...]
    low: Tensor | None

    def __post_init__(self) -> None:
        float64 = self.master.dtype == torch.float64
        self._check("master", self.master, (torch.float32, torch.float64))
        self._check("grad", self.grad, (torch.float64,) if float64 else tuple(ELEMENT_TYPES))
        self._check("the first state", self.states[0], (torch.float64,) if float64 else _STATE_TYPES)
        for state in self.states[1:]:
            self._check("the second state", state, (self.states[0].dtype,))
        if self.low is not None:
            self._check("low", self.low, LOW_TYPES)

    def _check(self, role: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
        """Raise an ``HfZeroError`` that names the tensor if its dtype, size, device or layout does not fit."""
        if tensor.dtype not in dtypes:
            raise HfZeroError(f"{self.name}: {role} is {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}")
        if tensor.numel() != self.master.numel() or not tensor.is_contiguous() or tensor.device != self.master.device:
            raise HfZeroError(
                f"{self.name}: {role} has {tensor.numel()} elements on {tensor.device} (contiguous: {tensor.is_contiguous()}); "
                f"master has {self.master.numel()} on {self.master.device}, and all must be contiguous"
            )

    def run_native(self, kernel: str, rule: ctypes.Structure, threads: int) -> bool:
        """Run a kernel of the library; return False, with no work done, if the torch reference must be used."""
        native = library()
        if native is None or not native.serves(self.master):
            announce()
            return False
        second = self.states[1] if len(self.states) > 1 else None

        native.call_threaded(
            "hfz_threaded_pass",
            kernel,
            threads,
            ctypes.c_int64(self.master.numel()),
            address(self.master),
            address(self.grad),
            ELEMENT_TYPES[self.grad.dtype],
            address(self.states[0]),
            address(second),
            ELEMENT_TYPES[self.states[0].dtype],
            address(self.low),
            0 if self.low is None else ELEMENT_TYPES[self.low.dtype],
            ctypes.byref(rule),
        )
        return True

    def flat_gradient(self, grad_factor: float) -> Tensor:
        """Return the gradient for the torch references, (numel,): in the master's dtype and times the factor; may be ``grad`` itself."""
        grad = self.grad.detach().view(-1).to(self.master.dtype)
        return grad if grad_factor == 1.0 else grad * grad_factor


def address(tensor: Tensor | None, start: int = 0) -> ctypes.c_void_p:
    """Return the address of element ``start``; 0 if ``tensor`` is None."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr() + start * tensor.element_size())


def floats(*names: str) -> list[tuple[str, type[ctypes.c_float]]]:
    """Return the fields of a rule that are floats, as ctypes needs them."""
    return [(name, ctypes.c_float) for name in names]
