"""Model FLOPs of a training step, and the peak of GPUs by name, from which model FLOPs utilisation (MFU) is computed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

# Dense bf16 matrix products with fp32 sums, TFLOP/s, from the makers' data sheets; the first name inside a device's name is used.
PEAKS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "A40": 150.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "MI300X": 1307.0,
}
HOW = (
    "MFU: 6 N + 12 L d s FLOPs a token (N parameters without input embeddings, L layers of width d, s tokens a sample; "
    "nothing for recomputation)"
)
HOW_FROZEN = HOW.replace("6 N", "4 N").replace("recomputation)", "recomputation or for gradients of the frozen base)")


def peak_of(device: str) -> float:
    """Return the FLOP/s of a device in bf16; 0 if it is not in the table."""
    words = f" {device.replace('-', ' ')} "
    return next((peak * 1e12 for name, peak in PEAKS.items() if f" {name} " in words), 0.0)


def parameters_of(model: nn.Module) -> int:
    """Return the number of parameters in matrix products: all except a table of input embeddings that has no other use."""
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    tied = head is not None and head.weight is table
    return sum(param.numel() for param in model.parameters()) - (0 if tied else table.numel())


def per_token(parameters: int, size: Mapping[str, int], frozen: bool = False) -> float:
    """Return the FLOPs of forward and backward of one token; frozen parameters have no gradient of their own, adapters are not counted."""
    return (4.0 if frozen else 6.0) * parameters + 12.0 * size["layers"] * size["width"] * size["length"]
