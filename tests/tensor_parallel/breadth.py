"""Splits a tiny model of every text architecture over 2 and over 4 ranks and compares it with one rank; what ``test_tp_breadth`` asserts.

python -m tests.tensor_parallel.breadth                         # over 2 ranks (a few minutes); writes the table of docs/tensor-parallel.md
python -m tests.tensor_parallel.breadth --ranks 4 --part 1/3    # a third of them over 4; the rows of the others stay
python -m tests.tensor_parallel.breadth LlamaForCausalLM        # prints its row
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support import ranks, zoo

WORLDS = (2, 4)
LOSS, GRAD, DOUBLE = 1e-5, 1e-4, 1e-9
RESULTS = Path(__file__).resolve().parents[1] / "data" / "tp_breadth.json"  # over 2 ranks; see ``results_of``
PAGE = Path(__file__).resolve().parents[2] / "docs" / "tensor-parallel.md"
START, STOP = "<!-- breadth: made by python -m tests.tensor_parallel.breadth -->", "<!-- end of breadth -->"


@dataclass
class Row:
    """One architecture: largest relative errors, share of linear weights split (and of these along the data flow), or why not."""

    name: str
    model_type: str
    loss: float = 0.0
    logits: float = 0.0
    grad: float = 0.0
    share: float = 0.0
    flow: float = 0.0
    error: str = ""
    double: float = 1.0  # the gradients' error in float64, where that in fp32 is above ``GRAD``

    @property
    def exact(self) -> bool:
        """Equal to one rank."""
        return not self.error and self.loss < LOSS and self.logits < 10 * LOSS and (self.grad < GRAD or self.double < DOUBLE)


def perturb(model: nn.Module) -> None:
    """Away from zeros and ones, which would hide errors."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.add_(torch.randn(param.shape, generator=generator).to(param.dtype) * 0.02)


def run(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and logits after a forward and backward."""
    torch.manual_seed(3)
    out = zoo.forward(model, batch)
    out.loss.backward()
    logits = out.logits if "logits" in out else out[1]
    return out.loss.detach(), logits.detach()


def relative(value: torch.Tensor, expected: torch.Tensor, floor: float = 1e-6) -> float:
    """Largest difference against the largest element."""
    return float((value.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=floor))


def measure(name: str, changes: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, padded: bool = False) -> Row:
    """One architecture, on this rank of the group; ``changes`` to its configuration. ``padded``: one of the rows is.

    A gradient that is zero but for rounding (of a key's bias, say) differs in fp32; float64 tells that from a wrong one.
    """
    from hf_zero.comm.back_end import build_collectives
    from hf_zero.comm.topology import build_topology
    from hf_zero.tensor_parallel.apply import apply_plan
    from hf_zero.tensor_parallel.functions import ModelGroup, Part
    from hf_zero.tensor_parallel.plan import COLUMN, ROW, WHOLE, TpPlan
    from hf_zero.tensor_parallel.planner import make_plan
    from hf_zero.tensor_parallel.solve import is_linear

    topology = build_topology(model_parallel=ranks.world())
    assert topology.model is not None
    group = ModelGroup(build_collectives(topology.model))
    row = Row(name, zoo.architecture(name).model_type)
    whole, split = zoo.build(name, changes=changes), zoo.build(name, changes=changes)
    for model in (whole, split):
        perturb(model)
        model.to(dtype)
    batch = zoo.batch(name, torch.Generator().manual_seed(0))
    if padded:
        batch = zoo.with_padding(whole, batch)
    try:
        expected = run(whole, batch)
    except RuntimeError as error:
        row.error = f"does not train on one rank: {str(error).splitlines()[0][:80]}"
        return row
    plan = TpPlan.from_dict(_made_once(group.collectives, lambda: make_plan(split, ranks.world()).to_dict()))
    linear = {path: child.weight.numel() for path, child in split.named_modules() if is_linear(type(child))}
    splits = {path: plan.modules[path].split for path in linear if path in plan.modules}
    total = max(sum(linear.values()), 1)
    row.share = sum(linear[path] for path, kind in splits.items() if kind != WHOLE) / total
    row.flow = sum(linear[path] for path, kind in splits.items() if kind in (COLUMN, ROW)) / total
    apply_plan(split, plan, group)
    found = run(split, batch)
    row.loss, row.logits = relative(found[0], expected[0]), relative(found[1], expected[1])
    grads = {key: param.grad for key, param in whole.named_parameters() if param.grad is not None}
    floor = 1e-4 * max(float(grad.abs().max()) for grad in grads.values())
    for key, param in split.named_parameters():
        wanted = grads.get(key)
        if wanted is None or param.grad is None:
            present = [grad for grad in (wanted, param.grad) if grad is not None and grad.any()]
            worst = 1.0 if present else 0.0
        else:
            entry = plan.parameters.get(key)
            part = wanted if entry is None else Part(entry.dim, entry.ranges, entry.shape[entry.dim]).take(wanted, group.rank)
            worst = float((param.grad - part).abs().max() / max(float(wanted.abs().max()), floor))
        row.grad = max(row.grad, worst)
    largest = torch.tensor(row.grad)
    group.collectives.all_reduce(largest, "largest error").wait()
    if largest >= GRAD and dtype == torch.float32:
        row.double = measure(name, changes, torch.float64, padded).grad
    return row


def _made_once(collectives: Any, make: Callable[[], Any]) -> Any:
    """What ``make`` returns or raises on rank 0, on every rank."""
    made: tuple[Any, Exception | None] = (None, None)
    if collectives.rank == 0:
        try:
            made = (make(), None)
        except Exception as error:  # every rank's error
            made = (None, error)
    value, error = collectives.broadcast_object(made, 0, "plan")
    if error is not None:
        raise error
    return value


def measure_each(names: list[str], padded: bool = False) -> list[Row]:
    """On a rank of the pool: every architecture, errors noted."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for name in names:
        try:
            rows.append(measure(name, padded=padded))
        except Exception as error:  # an architecture that fails is a row of the table
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            rows.append(Row(name, zoo.architecture(name).model_type, error=text[:160]))
    return rows


def measure_all(names: list[str], at_once: int = 4, world: int = 2, padded: bool = False) -> list[Row]:
    """The worse of the ranks' rows for every name."""
    rows: list[Row] = []
    for start in range(0, len(names), at_once):
        some = names[start : start + at_once]
        outcomes = ranks.observe_ranks(measure_each, world, some, padded, timeout=75 * world, group_timeout=15 * world)
        broken = any(outcome.ok and any("CollectiveError" in row.error for row in outcome.value) for outcome in outcomes)
        if all(outcome.ok for outcome in outcomes) and not (broken and len(some) > 1):
            rows.extend(max(row, key=lambda row: (bool(row.error), row.grad)) for row in zip(*[o.value for o in outcomes], strict=True))
        elif len(some) > 1:
            rows.extend(measure_all(some, 1, world, padded))
        else:
            rows.append(Row(some[0], zoo.architecture(some[0]).model_type, error="the ranks did not finish"))
        print(f"{len(rows)} of {len(names)}", file=sys.stderr, flush=True)
    return rows


def buildable() -> list[str]:
    """Architectures of which a tiny model can be built."""
    found = []
    for item in zoo.architectures():
        try:
            zoo.build(item.name)
        except Exception:  # no tiny configuration in this version of transformers
            continue
        found.append(item.name)
    return found


def results_of(world: int) -> Path:
    """Where the rows over that many ranks stand."""
    return RESULTS if world == 2 else RESULTS.with_name(f"{RESULTS.stem}_{world}.json")


def saved(world: int) -> list[Row]:
    """The rows that were measured last."""
    path = results_of(world)
    return [Row(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def summary(rows: list[Row], world: int) -> str:
    """One sentence about the rows over ``world`` ranks."""
    exact = [row for row in rows if row.exact]
    good = [row for row in exact if row.share >= 0.4]
    return f"TP = {world}: **{len(exact)} of {len(rows)} exact**, {len(good)} of them with at least 40 % of their linear weights split."


def table(by_world: dict[int, list[Row]]) -> str:
    """The generated part of the page."""
    two, four = (by_world[world] for world in WORLDS)
    lines = [
        START,
        f"{len(two)} architectures of transformers {_version()}, tiny, on gloo, fp32, against one rank (loss, logits and every gradient).",
        "",
        *(f"- {summary(rows, world)}" for world, rows in by_world.items() if rows),
        "",
        "| architecture | split | along the data flow | loss | gradients | TP 2 | split | TP 4 |",
        "|---|---:|---:|---:|---:|---|---:|---|",
    ]
    others = {row.name: row for row in four}
    for row in sorted(two, key=lambda row: row.name):
        errors = f"{row.share:.0%} | {row.flow:.0%} | {row.loss:.0e} | {row.grad:.0e}" if not row.error else " | | | "
        other = others.get(row.name)
        share = f"{other.share:.0%}" if other and not other.error else ""
        lines.append(f"| {row.name} | {errors} | {_result(row)} | {share} | {_result(other) if other else ''} |")
    return "\n".join([*lines, STOP])


def _result(row: Row) -> str:
    if row.error:
        return row.error.replace("|", "/")
    if not row.exact:
        return "differs"
    return "exact" + (f" (rounding of a gradient near zero: {row.double:.0e} in float64)" if row.grad >= GRAD else "")


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def write(rows: list[Row], world: int) -> None:
    """Puts ``rows`` among the results over ``world`` ranks, and writes the page."""
    merged = {row.name: row for row in (*saved(world), *rows)}
    text = json.dumps([asdict(row) for row in merged.values()], indent=0)
    results_of(world).write_text(text + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(START)[0], page.split(STOP)[1]
    PAGE.write_text(before + table({world: saved(world) for world in WORLDS}) + after, encoding="utf-8")


def part_of(names: list[str], part: str) -> list[str]:
    """The names of ``part``: "2/3" is the second third."""
    index, count = map(int, part.split("/"))
    return names[(index - 1) * len(names) // count : index * len(names) // count]


def main() -> None:
    """Measures the named architectures and prints them, or all or a part of them and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures to print; none: all, for the page")
    parser.add_argument("--ranks", type=int, default=2, choices=WORLDS)
    parser.add_argument("--part", default="1/1", help="which part of all, as 2/3")
    arguments = parser.parse_args()
    if arguments.names:
        for row in measure_all(arguments.names, world=arguments.ranks):
            print(row)
    else:
        write(measure_all(part_of(buildable(), arguments.part), world=arguments.ranks), arguments.ranks)


if __name__ == "__main__":
    main()
