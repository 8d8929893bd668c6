"""Compiles every Triton kernel to a GPU's machine code, which needs the package triton and no GPU; run as a program.

The interpreter, in which the other tests run, takes much that the compiler refuses.
"""

from __future__ import annotations

import itertools
from typing import Any

import triton  # type: ignore[import-not-found]
from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
from triton.compiler import ASTSource  # type: ignore[import-not-found]

from hf_zero.native import triton_kernels
from hf_zero.native.block_codes import LARGEST

_FLOATS = (
    "grad_factor",
    "mean_weight",
    "beta2",
    "square_weight",
    "root_divisor",
    "eps",
    "minus_step",
    "decay",
    "beta",
    "weight",
    "divisor",
    "keep",
    "take",
)
_COUNTS = ("count", "first", "begin", "bits_stride", "scales_stride", "codes_stride", "error_scales_stride", "error_codes_stride")
_BYTES = ("sent_bits", "bits", "alive", "codes", "error_codes")
_PLACES = ("starts", "counts")
TARGETS = (80, 90, 100)


def _type_of(name: str, types: dict[str, str]) -> str:
    if name in types:
        return types[name]
    if name in _FLOATS:
        return "fp32"
    if name in _COUNTS:
        return "i64"
    return "*u8" if name in _BYTES else "*i64" if name in _PLACES else "*fp32"


def build(kernel: Any, constants: dict[str, Any], target: int, types: dict[str, str] | None = None, **options: Any) -> Any:
    """Compiles ``kernel`` with ``constants``, the other arguments being of the types that they have in a launch."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else _type_of(name, types or {}) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=places), target=GPUTarget("cuda", target, 32), options=options
    )


def main() -> None:
    """Every type and flag; integers that are 1 in a launch are constants of the compiled kernel, so both ways."""
    for target, moment, low, mode in itertools.product(TARGETS, ("*fp32", "*bf16"), (None, "*bf16", "*fp16"), (0, 1, 2)):
        types = {"grad": low or "*fp32", "exp_avg": moment, "exp_avg_sq": moment, "low": low or "*fp32"}
        build(triton_kernels.adam, {"DECAY_MODE": mode, "HAS_LOW": low is not None, "BLOCK": 1024}, target, types)
    for target, kind in itertools.product(TARGETS, ("*bf16", "*fp16")):
        build(triton_kernels.take_changed, {"BLOCK": 2048}, target, {"shard": kind})
    codes: list[tuple[Any, tuple[str, ...], tuple[str, ...]]] = [
        (triton_kernels.compress, ("HAS_FRESH", "HAS_SENT", "HAS_ALIVE"), ("bits_stride", "scales_stride")),
        (triton_kernels.decompress, ("HAS_ALIVE",), ("bits_stride", "scales_stride")),
        (triton_kernels.take, ("DECAYS", "EPS_INSIDE", "HAS_ALIVE"), ("first", "begin")),
    ]
    for target, (kernel, flags, ones) in itertools.product(TARGETS, codes):
        workers = [{"WORKERS": count} for count in (1, 3)] if "WORKERS" in kernel.arg_names else [{}]
        for values, some, more in itertools.product(itertools.product((False, True), repeat=len(flags)), ((), ones), workers):
            constants = {**dict(zip(flags, values, strict=True)), "BLOCK": 1024, **dict.fromkeys(some, 1), **more}
            built = build(kernel, constants, target, enable_fp_fusion=False)
            assert "cubin" in built.asm and "fma.rn.f32" not in built.asm["ptx"], f"{constants}: products and sums round by themselves"
    quantized()
    print("compiled")


def quantized() -> None:
    """The codes of ZeRO++, in every type and width."""
    ones = ("count", "scales_stride", "codes_stride")
    for target, (bits, largest), kind in itertools.product(TARGETS, LARGEST.items(), ("*fp32", "*bf16", "*fp16")):
        for more in ({}, dict.fromkeys(ones, 1)):
            constants = {"BITS": bits, "BLOCK": 256, **more}
            built = [
                build(
                    triton_kernels.quantize,
                    {**constants, "LARGEST": largest, "HAS_ERROR": kept},
                    target,
                    {"values": kind},
                    enable_fp_fusion=False,
                )
                for kept in (False, True)
            ]
            built += [
                build(triton_kernels.dequantize, {**constants, "WORKERS": workers}, target, {"out": kind}, enable_fp_fusion=False)
                for workers in (1, 3)
            ]
            assert not any("fma.rn.f32" in one.asm["ptx"] for one in built), "products and sums round by themselves"


if __name__ == "__main__":
    main()
