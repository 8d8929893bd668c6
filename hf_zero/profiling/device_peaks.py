"""The most operations per second that known devices reach, as their makers say."""

from __future__ import annotations

import re

# 10^12 operations per second of products of bf16 matrices with fp32 sums, dense: what the makers give "with sparsity" is twice that.
# One entry per name under which torch knows one device.
PEAK_TFLOPS: tuple[tuple[str, float, str], ...] = (
    ("B200", 2250.0, "NVIDIA HGX B200 datasheet"),
    ("H200 NVL", 835.5, "NVIDIA H200 datasheet"),
    ("H200", 989.5, "NVIDIA H200 datasheet"),
    ("H100 NVL", 835.5, "NVIDIA H100 datasheet"),
    ("H100 PCIe", 756.5, "NVIDIA H100 datasheet"),
    ("H100", 989.5, "NVIDIA H100 datasheet"),
    ("A100", 312.0, "NVIDIA A100 datasheet"),
    ("A40", 149.7, "NVIDIA A40 datasheet"),
    ("A10", 125.0, "NVIDIA A10 datasheet"),
    ("L40S", 362.05, "NVIDIA L40S datasheet"),
    ("L40", 181.05, "NVIDIA L40 datasheet"),
    ("L4", 121.0, "NVIDIA L4 datasheet"),
    ("RTX 4090", 165.2, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    ("RTX 3090", 71.0, "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A"),
    ("MI325X", 1307.4, "AMD Instinct MI325X data sheet"),
    ("MI300X", 1307.4, "AMD Instinct MI300X data sheet"),
    ("MI250X", 191.5, "AMD Instinct MI200 data sheet; torch shows each of its two dies as a device"),
)
# Devices with such names that are not the one of the table: smaller or larger ones, shares of one, and names of two.
_OTHERS = re.compile(r"laptop|max-q|\bmig\b|4090 d\b|\bti\b|\bgrid\b|-\d+[abcq]\b|MI250X */ *MI250\b", re.IGNORECASE)


def peak_tflops(device_name: str) -> float | None:
    """The peak of a device in 10^12 dense bf16 operations per second, from ``PEAK_TFLOPS``; None where it is not known.

    Args:
        device_name: As ``torch.cuda.get_device_name`` gives it, such as "NVIDIA H100 80GB HBM3".
    """
    if _OTHERS.search(device_name):
        return None
    for name, peak, _ in PEAK_TFLOPS:
        if re.search(rf"\b{re.escape(name)}\b", device_name, re.IGNORECASE):
            return peak
    return None
