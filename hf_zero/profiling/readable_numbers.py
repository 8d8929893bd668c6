"""Large and small numbers as people read them, under the names that DeepSpeed's profiler gives the functions."""

from __future__ import annotations

_SCALES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0), ("m", 1e-3), ("u", 1e-6))


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """``num`` with the prefix that leaves one to three digits before the point, or with the prefix ``units``.

    Args:
        num: A number.
        units: "T", "G", "M", "K", "", "m" or "u"; None chooses.
        precision: Digits behind the point.
    """
    if units is None:
        units = next((prefix for prefix, scale in _SCALES if abs(num) >= scale), "u") if num else ""
    scale = dict(_SCALES).get(units.strip(), 1.0)
    return f"{round(num / scale, precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations, for example ``43.5 GFLOPs``."""
    return f"{number_to_string(flops, _prefix(units, 'FLOPS'), precision)}FLOPs"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiplications with addition, for example ``21.7 GMACs``."""
    return f"{number_to_string(macs, _prefix(units, 'MACS'), precision)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Numbers of parameters, for example ``124.44 M`` or ``1.56 B``."""
    return number_to_string(params_num, units.replace("B", "G") if units else None, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds, for example ``3.4 ms``."""
    return f"{number_to_string(duration, _prefix(units, 'S'), precision)}s"


def _prefix(units: str | None, name: str) -> str | None:
    """The prefix of a unit written in full ("GFLOPS", "ms")."""
    return units[: -len(name)] if units and units.upper().endswith(name) else units
