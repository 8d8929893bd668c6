"""Divides a tiny model of every text architecture over 2 and over 4 stages; what ``test_pp_breadth`` asserts.

python -m tests.support.pp_breadth                         # all, over 2 and over 4 stages; writes the table of docs/pipeline-parallel.md
python -m tests.support.pp_breadth --part 1/2              # half of them; the rows of the others stay
python -m tests.support.pp_breadth LlamaForCausalLM        # prints its rows
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

from tests.support import stages as simulated
from tests.support import zoo
from tests.support.tp_breadth import buildable, part_of, perturb

STAGES = (2, 4)
LOSS, GRAD, DOUBLE = 1e-5, 1e-4, 1e-9
RESULTS = Path(__file__).resolve().parents[1] / "data" / "pp_breadth.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipeline-parallel.md"
START, STOP = "<!-- breadth: made by python -m tests.support.pp_breadth -->", "<!-- end of breadth -->"
_LAYERS = """num_hidden_layers num_layers n_layer n_layers num_decoder_layers encoder_layers decoder_layers num_encoder_layers""".split()


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


def deeper(config: Any, layers: int) -> Any:
    """``config`` with at least that many layers, those of parts of it too; lists with an entry per layer repeat."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            deeper(value, layers)
        elif isinstance(value, list) and value and any(getattr(config, field, None) == len(value) < layers for field in _LAYERS):
            setattr(config, name, (value * layers)[: max(layers, len(value))])
    for field in _LAYERS:
        if isinstance(vars(config).get(field), int) and 1 < vars(config)[field] < layers:
            setattr(config, field, layers)
    return config


def build(name: str, layers: int, changes: dict[str, Any] | None = None) -> nn.Module:
    """A tiny model with so many layers where its configuration takes them, else as many as it has."""
    try:
        fields = {field: value for field, value in vars(deeper(zoo.small_config(name), layers)).items() if not field.startswith("_")}
        model = zoo.build(name, changes={**fields, **(changes or {})})
    except Exception:  # a configuration whose fields depend on the number of layers
        model = zoo.build(name, changes=changes)
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


def measure(name: str, stages: int, changes: dict[str, Any] | None = None, method: str = "uniform", dtype: torch.dtype = torch.float32) -> Row:
    """One architecture; ``changes`` to its configuration."""
    from hf_zero.errors import HfZeroError
    from hf_zero.pipeline.partition import make_plan

    row = Row(name, zoo.architecture(name).model_type, stages)
    model = build(name, max(stages, 2), changes).to(dtype)
    row.plan = bool(getattr(model.config, "base_model_pp_plan", None))
    call = call_of(model, name)
    try:
        expected = simulated.run_plain(model, call)
    except Exception as error:
        row.error = f"plain: does not train as it is: {_first_line(error)}"
        return row
    model.zero_grad()
    try:
        plan = make_plan(model, stages, method, call)
        row.crossings = max(map(len, plan.crossings))
        found = simulated.run_stages(model, plan, call)
    except HfZeroError as error:
        row.refused = str(error)
        return row
    row.loss = relative(found.loss, expected.loss)
    row.grad = _worst(found.grads, expected.grads)
    if row.grad >= GRAD and dtype == torch.float32 and row.loss < LOSS:
        row.double = measure(name, stages, changes, method, torch.float64).grad
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


def measure_each(names: Sequence[str], stages: int) -> list[Row]:
    """Every architecture, failures noted."""
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
    return rows


def saved() -> list[Row]:
    """The rows that were measured last."""
    return [Row(**entry) for entry in json.loads(RESULTS.read_text(encoding="utf-8"))] if RESULTS.exists() else []
