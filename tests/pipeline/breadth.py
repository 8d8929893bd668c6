"""Divides a tiny model of every text architecture over 2 and over 4 stages; what ``test_pp_breadth`` asserts.

python -m tests.pipeline.breadth                         # all, over 2 and over 4 stages; writes the table of docs/pipeline-parallel.md
python -m tests.pipeline.breadth --part 1/2              # half of them; the rows of the others stay
python -m tests.pipeline.breadth LlamaForCausalLM        # prints its rows
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.pipeline import stages as simulated
from tests.support import zoo
from tests.tensor_parallel.breadth import buildable, part_of, perturb

STAGES = (2, 4)
LOSS, GRAD, DOUBLE = 1e-5, 1e-4, 1e-9
RESULTS = Path(__file__).resolve().parents[1] / "data" / "pp_breadth.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipeline-parallel.md"
START, STOP = "<!-- breadth: made by python -m tests.pipeline.breadth -->", "<!-- end of breadth -->"
_LAYERS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers",
    "num_decoder_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
)  # fmt: skip


@dataclass
class Row:
    """One architecture over some stages: largest relative errors, tensors over the busiest border, or why not; and transformers' own."""

    name: str
    model_type: str
    stages: int
    loss: float = 0.0
    grad: float = 0.0
    crossings: int = 0
    refused: str = ""
    error: str = ""  # the model does not run, or the simulation failed
    double: float = 1.0  # the gradients' error in float64, where that in fp32 is above ``GRAD``
    peer: str = ""  # transformers' own pipeline: "exact" (logits alone), or why not
    plan: bool = False  # the configuration has transformers' plan of names

    @property
    def exact(self) -> bool:
        """Equal to one process."""
        return not self.error and not self.refused and self.loss < LOSS and (self.grad < GRAD or self.double < DOUBLE)

    @property
    def wrong(self) -> bool:
        """Neither equal nor refused."""
        return not self.exact and not self.refused and not self.error.startswith("plain")


def deeper(config: Any, layers: int, kinds: tuple[type, ...]) -> Any:
    """``config`` with at least that many layers, those of parts of it too; lists of such ``kinds`` with an entry per layer repeat."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            deeper(value, layers, kinds)
        elif isinstance(value, list) and isinstance(next(iter(value), None), kinds) and _an_entry_per_layer(config, len(value)):
            setattr(config, name, (value * layers)[: max(layers, len(value))])
    for field in _LAYERS:
        if isinstance(vars(config).get(field), int) and 1 < vars(config)[field] < layers:
            setattr(config, field, layers)
    return config


def _an_entry_per_layer(config: Any, entries: int) -> bool:
    return entries > 0 and any(getattr(config, field, None) == entries for field in _LAYERS)


def build(name: str, layers: int, changes: dict[str, Any] | None = None) -> nn.Module:
    """A tiny model with so many layers where its configuration takes them, else as many as it has."""
    for kinds in ((object,), (str,), ()):  # some lists have an entry per layer, others as many by chance
        config = deeper(zoo.small_config(name), layers if kinds else 0, kinds)
        fields = {field: value for field, value in vars(config).items() if not field.startswith("_")}
        try:
            model = zoo.build(name, changes={**(fields if kinds else {}), **(changes or {})})
            break
        except Exception:  # a configuration whose fields depend on the number of layers
            if not kinds:
                raise
    perturb(model)
    return model


def call_of(model: nn.Module, name: str) -> dict[str, Any]:
    """A batch for it, and no cache."""
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    return {**zoo.batch(name, torch.Generator().manual_seed(0)), **({"use_cache": False} if takes_cache else {})}


def relative(value: torch.Tensor, expected: torch.Tensor, floor: float = 1e-6) -> float:
    """Largest difference against the largest element; infinite where either is not a number."""
    error = float((value.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=floor))
    return error if error == error else float("inf")


def measure(name: str, stages: int, changes: dict[str, Any] | None = None, layers: int = 0, dtype: torch.dtype = torch.float32) -> Row:
    """One architecture; ``changes`` to its configuration.

    Where as many layers as stages cannot be divided (some keep things for others), it is tried again with four times as many.
    """
    from hf_zero.errors import HfZeroError
    from hf_zero.pipeline.partition import make_plan

    row = Row(name, zoo.architecture(name).model_type, stages)
    model, whole = (build(name, layers or stages, changes).to(dtype) for _ in range(2))
    row.plan = bool(getattr(model.config, "base_model_pp_plan", None))
    call = call_of(model, name)
    try:
        expected = simulated.run_plain(whole, call)
    except Exception as error:
        row.error = f"plain: does not train as it is: {_first_line(error)}"
        return row
    try:
        plan = make_plan(model, stages, "uniform", call)
        row.crossings = max(map(len, plan.crossings))
        found = simulated.run_stages(model, plan, call)
    except HfZeroError as error:
        row.refused = str(error)
        deep = None if layers else measure(name, stages, changes, 4 * stages, dtype)
        return deep if deep is not None and deep.exact else row
    row.loss = relative(found.loss, expected.loss)
    row.grad = _worst(found.grads, expected.grads)
    if row.grad >= GRAD and dtype == torch.float32 and row.loss < LOSS:
        row.double = measure(name, stages, changes, layers, torch.float64).grad
    return row


def _worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    floor = 1e-4 * max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    worst = 0.0
    for name, grad in expected.items():
        other = found[name]
        if grad is None or other is None:
            present = [item for item in (grad, other) if item is not None and item.any()]
            worst = max(worst, 1.0 if present else 0.0)
        else:
            worst = max(worst, relative(other, grad, floor))
    return worst


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def peer(name: str, stages: int) -> str:
    """transformers' own pipeline on the same model, its messages handed over in this process: forward alone, since it is for inference."""
    try:
        import transformers.distributed.pipeline_parallel as own
    except ImportError:
        return "not in this version"
    queue: list[torch.Tensor] = []
    last: list[torch.Tensor] = []

    class Mesh:
        def __init__(self, rank: int) -> None:
            self.get_local_rank = lambda: rank

        def size(self) -> int:
            return stages

        def get_group(self) -> None:
            return None

    class Here(own.PipelineStage):  # type: ignore[misc]
        def __init__(self, mesh: Any) -> None:
            self.pp_rank, self.pp_size = mesh.get_local_rank(), mesh.size()
            self.pp_is_first_stage, self.pp_is_last_stage = self.pp_rank == 0, self.pp_rank == self.pp_size - 1

        def communicate(self, operation: str, *, tensor: torch.Tensor | None = None, **_: Any) -> torch.Tensor | None:
            if tensor is not None:
                queue.append(tensor)
                return None
            return queue.pop()

        def broadcast_from_last(self, tensor: Any, **_: Any) -> Any:
            if tensor is not None:
                last.append(tensor)
            return tensor

    original, own.PipelineStage = own.PipelineStage, Here
    try:
        model = build(name, max(stages, 2)).eval()
        call = {key: value for key, value in call_of(model, name).items() if key != "labels"}
        with torch.no_grad():
            torch.manual_seed(simulated.SEED)
            expected = model(**call).logits
            for rank in range(stages):
                part = build(name, max(stages, 2)).eval()
                own.apply_pipeline_parallelism(part, Mesh(rank))
                torch.manual_seed(simulated.SEED)
                part(**call)
        if last[0].shape != expected.shape or relative(last[0], expected) > 10 * LOSS:
            return "wrong logits"
        return "exact"
    except Exception as error:
        return f"fails: {_first_line(error)}"
    finally:
        own.PipelineStage = original


def measure_each(names: Sequence[str], stages: int, keep: bool = False) -> list[Row]:
    """Every architecture, failures noted; ``keep`` writes each row among the results at once."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for name in names:
        try:
            row = measure(name, stages)
        except Exception as error:  # an architecture that fails is a row of the table
            row = Row(name, zoo.architecture(name).model_type, stages, error=_first_line(error))
        row.peer = peer(name, stages)
        rows.append(row)
        print(len(rows), "of", len(names), row, file=sys.stderr, flush=True)
        if keep:
            write(rows[-1:])
    return rows


def saved() -> list[Row]:
    """The rows that were measured last."""
    return [Row(**entry) for entry in json.loads(RESULTS.read_text(encoding="utf-8"))] if RESULTS.exists() else []


def write(rows: Sequence[Row]) -> None:
    """Puts ``rows`` among the results, and writes the page."""
    merged = {(row.name, row.stages): row for row in (*saved(), *rows)}
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(json.dumps([asdict(row) for row in merged.values()], indent=0) + "\n", encoding="utf-8")
    partial.replace(RESULTS)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.split(START)[0] + table(list(merged.values())) + page.split(STOP)[1], encoding="utf-8")


def summary(rows: Sequence[Row]) -> str:
    """One sentence about the rows over as many stages."""
    run = [row for row in rows if not row.error.startswith("plain")]
    exact, refused, wrong = (sum(kind) for kind in zip(*((row.exact, bool(row.refused), row.wrong) for row in run), strict=True))
    peers = [row for row in run if row.peer == "exact"]
    return (
        f"PP = {rows[0].stages}: **{exact} of {len(run)} exact**, {refused} refused with the reason, {wrong} wrong. transformers' own "
        f"gives the right logits for {len(peers)}, fails for {sum(row.peer.startswith('fails') for row in run)} and gives wrong ones for "
        f"{sum(row.peer.startswith('wrong') for row in run)}; {sum(row.plan for row in run)} have a plan of names of their own."
    )


def table(rows: Sequence[Row]) -> str:
    """The generated part of the page."""
    by_stages = {stages: {row.name: row for row in rows if row.stages == stages} for stages in STAGES}
    two, four = by_stages.values()
    lines = [
        START,
        f"Architectures of transformers {_version()}, tiny, all stages in one process, fp32, against the whole model: loss and every "
        "gradient. What a stage does not hold is NaN there.",
        "",
        *(f"- {summary(list(found.values()))}" for found in by_stages.values() if found),
        "",
        "| architecture | loss | gradients | tensors over a border | PP 2 | tensors | PP 4 | transformers' own, PP 2 |",
        "|---|---:|---:|---:|---|---:|---|---|",
    ]
    for name in sorted({*two, *four}):
        one, other = two.get(name), four.get(name)
        errors = f"{one.loss:.0e} | {one.grad:.0e} | {one.crossings}" if one and one.exact else " | | "
        crossings = other.crossings if other and other.exact else ""
        own = (one or other or Row(name, "", 0)).peer.replace("|", "/")
        lines.append(f"| {name} | {errors} | {_result(one)} | {crossings} | {_result(other)} | {own} |")
    return "\n".join([*lines, STOP])


def _result(row: Row | None) -> str:
    if row is None:
        return "not measured"
    if row.exact:
        return "exact" + (f" (rounding of a gradient near zero: {row.double:.0e} in float64)" if row.grad >= GRAD else "")
    return (row.refused or row.error or "differs").replace("|", "/").replace("\n", " ")


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def main() -> None:
    """Measures the named architectures and prints them, or all or a part of them and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures to print; none: all, for the page")
    parser.add_argument("--stages", type=int, choices=STAGES, help="only over so many")
    parser.add_argument("--part", default="1/1", help="which part of all, as 2/3")
    parser.add_argument("--missing", action="store_true", help="only what has no exact row yet")
    arguments = parser.parse_args()
    for stages in [arguments.stages] if arguments.stages else STAGES:
        names = arguments.names or part_of(buildable(), arguments.part)
        if arguments.missing:
            done = {row.name for row in saved() if row.stages == stages and row.exact}
            names = [name for name in names if name not in done]
        measure_each(names, stages, keep=not arguments.names)


if __name__ == "__main__":
    main()
