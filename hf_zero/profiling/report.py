"""Print a profile: figures of a step, the most expensive modules of each depth, and the tree of modules, in readable units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hf_zero.errors import ConfigError
from hf_zero.profiling.costs import ModuleCost
from hf_zero.system import own_files

_SCALES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0), ("m", 1e-3), ("u", 1e-6))


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Return ``num`` with the prefix that leaves one to three digits before the point, or with the prefix ``units``.

    Args:
        num: The number.
        units: "T", "G", "M", "K", "", "m" or "u"; None selects one.
        precision: Digits after the decimal point.
    """
    if units is None:
        units = next((prefix for prefix, scale in _SCALES if abs(num) >= scale), "u") if num else ""
    scale = dict(_SCALES).get(units.strip(), 1.0)
    return f"{round(num / scale, precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of operations as text, for example ``43.5 GFLOPs``."""
    return f"{number_to_string(flops, _prefix(units, 'FLOPS'), precision)}FLOPs"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of multiply-adds as text, for example ``21.7 GMACs``."""
    return f"{number_to_string(macs, _prefix(units, 'MACS'), precision)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of parameters as text, for example ``124.44 M`` or ``1.56 B``."""
    return number_to_string(params_num, units.replace("B", "G") if units else None, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Return a duration in seconds as text, for example ``3.4 ms``."""
    return f"{number_to_string(duration, _prefix(units, 'S'), precision)}s"


def _prefix(units: str | None, name: str) -> str | None:
    """Return the prefix of a unit written in full ("GFLOPS", "ms")."""
    return units[: -len(name)] if units and units.upper().endswith(name) else units


_LINE = "-" * 100


def write_report(text: str, output_file: str | None) -> None:
    """Print ``text``, or write it to ``output_file``.

    Raises:
        ConfigError: The file cannot be written.
    """
    if output_file is None:
        print(text, flush=True)
        return
    try:
        own_files.write_text(Path(output_file), text + "\n")
    except OSError as error:
        raise ConfigError(f"the report of the profiler cannot be written to {output_file!r}: {error}. Name a writable file") from error


def report_text(title: str, figures: Sequence[tuple[str, str]], root: ModuleCost, depth: int, top: int, detailed: bool) -> str:
    """Return the report as text: figures, the most expensive classes of modules and, if ``detailed``, the tree of modules.

    Args:
        title: Title of the report.
        figures: Names and values for the top of the report.
        root: Root of the tree of modules.
        depth: Depth down to which modules are listed; -1 lists all.
        top: Number of classes of modules listed per depth.
        detailed: Whether to list every module.
    """
    width = max((len(name) for name, _ in figures), default=0)
    lines = [_LINE, title, _LINE]
    lines += [f"{name.ljust(width)}  {value}" for name, value in figures]
    lines += ["", *aggregated_lines(root, depth, top)]
    if detailed:
        lines += [
            "",
            "Modules: parameters, multiply-adds, time of forward, operations per second; in parentheses, shares of the whole model.",
            "Time includes counting and waiting for parameters. A module that is called outside of the model's forward, or by",
            "another function than its forward, shows only the time of its forward.",
            *tree_lines(root, depth),
        ]
    return "\n".join([*lines, _LINE])


def aggregated_lines(root: ModuleCost, depth: int, top: int) -> list[str]:
    """Return lines with the classes of modules that have the most parameters, operations and time at each depth."""
    levels = list(_levels(root))
    deepest = len(levels) - 1 if depth < 0 else min(depth, len(levels) - 1)
    lines = [f"Most expensive {top} class(es) of modules by depth, forward:"]
    columns: tuple[tuple[str, Callable[[ModuleCost], float], Callable[[float], str]], ...] = (
        ("parameters", lambda node: node.params, params_to_string),
        ("MACs", lambda node: node.cost.flops / 2, macs_to_string),
        ("time", lambda node: node.cost.seconds, duration_to_string),
    )
    for number, nodes in enumerate(levels[: deepest + 1]):
        lines.append(f"depth {number}:")
        for name, value_of, shown in columns:
            sums: dict[str, float] = {}
            for node in nodes:
                sums[node.kind] = sums.get(node.kind, 0) + value_of(node)
            best = sorted(sums.items(), key=lambda item: -item[1])[: max(top, 0)]
            lines.append(f"    {name.ljust(10)}  {', '.join(f'{kind} {shown(value)}' for kind, value in best)}")
    return lines


def tree_lines(root: ModuleCost, depth: int) -> list[str]:
    """Return one line per module, indented."""
    lines: list[str] = []

    def visit(node: ModuleCost, level: int) -> None:
        head = node.kind if level == 0 else f"({node.name}) {node.kind}"
        lines.append(f"{'  ' * level}{head}  {_figures(node, root)}")
        if depth < 0 or level < depth:
            for child in node.children:
                visit(child, level + 1)

    visit(root, 0)
    return lines


def _figures(node: ModuleCost, root: ModuleCost) -> str:
    cost = node.cost
    parts = [
        f"{params_to_string(node.params)} ({_share(node.params, root.params)})",
        f"{macs_to_string(cost.flops / 2)} ({_share(cost.flops, root.cost.flops)})",
        f"{duration_to_string(cost.seconds)} ({_share(cost.seconds, root.cost.seconds)})",
        rate_text(cost.flops, cost.seconds),
    ]
    if not cost.calls and not cost.flops:
        return f"{parts[0]}, not called"
    return ", ".join(parts)


def rate_text(flops: float, seconds: float) -> str:
    """Return a number of operations per second as text, for example ``5.8 TFLOPS``."""
    return f"{number_to_string(flops / seconds if seconds > 0 else 0.0)}FLOPS"


def flops_text(flops: float) -> str:
    """Return a number of operations and the equivalent number of multiply-adds, as text."""
    return f"{flops_to_string(flops)} ({macs_to_string(flops / 2)})"


def _share(value: float, whole: float) -> str:
    return f"{100 * value / whole:.3g} %" if whole else "-"


def _levels(root: ModuleCost) -> Iterator[list[ModuleCost]]:
    level = [root]
    while level:
        yield level
        level = [child for node in level for child in node.children]
