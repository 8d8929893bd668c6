"""The fused Adam pass as one Triton kernel: unscale, clip, Adam or AdamW and the 16-bit copy, for tensors on a GPU.

The order of operations is that of ``adam.py``. Triton fuses products and sums as it likes, so the last bits may differ from the
host's; they do not depend on where a range is cut, each element being by itself.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from hf_zero.native.adam_rule import AdamRule
from hf_zero.native.passes import PassTensors

_BLOCK = 1024


def is_available() -> bool:
    """Whether Triton can be imported."""
    return _kernel() is not None


@functools.cache
def _kernel() -> Any:
    """The kernel, compiled at its first launch; None without Triton."""
    try:
        from hf_zero.native.triton_kernel import adam
    except ImportError:
        return None
    return adam


def adam_triton(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, low: Tensor | None, rule: AdamRule) -> None:
    """As ``adam_update`` for fp32 masters on a GPU; with ``TRITON_INTERPRET=1`` in host memory, for tests.

    Raises:
        HfZeroError: Tensors that do not fit together.
        ImportError: There is no Triton.
    """
    PassTensors("adam_triton", master, grad, (exp_avg, exp_avg_sq), low)
    kernel = _kernel()
    if kernel is None:
        raise ImportError("adam_triton needs the package triton, which comes with torch for CUDA")
    count = master.numel()
    if count == 0:
        return
    kernel[(-(-count // _BLOCK),)](
        master, grad, exp_avg, exp_avg_sq, master if low is None else low, count,
        float(rule.grad_factor), 1 - rule.betas[0], rule.betas[1], 1 - rule.betas[1], rule.root_divisor, float(rule.eps),
        rule.minus_step, rule.decay, DECAY_MODE=rule.decay_mode, HAS_LOW=low is not None, BLOCK=_BLOCK,
    )  # fmt: skip
