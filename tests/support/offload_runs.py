"""Ways to offload that tests compare with a run without offload."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.parity import SMALL_MODEL, Run, Trace, collect, initialize, train

# Small enough that every shard of the small models is cut into several sub-groups.
SMALL_LOTS = {"sub_group_size": 2048}
FILE = {"device": "nvme", "nvme_path": "{nvme}"}

FULL, FORWARD = ({"hf_zero": {"offload_overlap": name}} for name in ("full", "forward"))

# Name -> (the training device counts as having memory of its own, blocks of zero_optimization; "hf_zero" is a section of its own).
OPTIMIZER_WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "cpu": (False, {"offload_optimizer": {"device": "cpu"}}),
    "cpu, apart": (True, {"offload_optimizer": {"device": "cpu"}}),
    "cpu, half, apart": (True, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    "cpu, overlap": (False, {"offload_optimizer": {"device": "cpu"}, **FULL}),
    "cpu, half, apart, no overlap": (True, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "hf_zero": {"offload_overlap": "none"}}),
    "nvme, overlap": (False, {"offload_optimizer": FILE, **SMALL_LOTS, **FORWARD}),
    "nvme": (False, {"offload_optimizer": FILE, **SMALL_LOTS}),
    "nvme, one buffer": (False, {"offload_optimizer": {**FILE, "buffer_count": 1}}),
    "nvme, pipelined, apart": (True, {"offload_optimizer": {**FILE, "pipeline_read": True, "pipeline_write": True}, **SMALL_LOTS}),
    "nvme, pipelined": (False, {"offload_optimizer": {**FILE, "pipeline_read": True, "pipeline_write": True, "ratio": 0.7}}),
}
_PARAM_FILE = {**FILE, "max_in_cpu": 0, "buffer_count": 2}
PARAM_WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "parameters cpu, apart": (True, {"offload_param": {"device": "cpu"}}),
    "parameters nvme": (False, {"offload_param": _PARAM_FILE}),
    "both cpu, apart": (True, {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}),
    "both cpu, apart, forward": (True, {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}, **FORWARD}),
    "both nvme": (False, {"offload_param": _PARAM_FILE, "offload_optimizer": FILE}),
    "both nvme, some kept, apart": (
        True,
        {"offload_param": {**FILE, "max_in_cpu": 600, "buffer_count": 1}, "offload_optimizer": {**FILE, "ratio": 0.6}, **SMALL_LOTS},
    ),
}


def ways(stage: int) -> dict[str, tuple[bool, dict[str, Any]]]:
    """Return the ways to offload at a stage."""
    return {**OPTIMIZER_WAYS, **PARAM_WAYS} if stage == 3 else OPTIMIZER_WAYS


@contextlib.contextmanager
def blocks_of(way: tuple[bool, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a way with a folder of its own in ``nvme_path``; meanwhile the device has memory of its own or not, as ``way``
    sets, and sub-groups of small models may be as small as ``sub_group_size`` asks.
    """
    from hf_zero.offload import file_states
    from hf_zero.offload import policy as offloading

    apart, blocks = way
    apart = apart or ranks.device().type != "cpu"
    on_host = mock.patch.object(offloading, "trains_on_host", lambda device: not apart)
    with tempfile.TemporaryDirectory() as folder, on_host, mock.patch.object(file_states, "LEAST_NUMEL", 0):
        yield {name: _with_path(value, folder) for name, value in blocks.items()}
        assert not any(Path(folder).iterdir()), "swap files are left"


def _with_path(value: Any, folder: str) -> Any:
    return (
        {key: item.replace("{nvme}", folder) if isinstance(item, str) else item for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def sections(stage: int, blocks: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of a configuration with the blocks of a way."""
    own = blocks.get("hf_zero", {})
    return {"zero_optimization": {"stage": stage, **SMALL_MODEL, **{k: v for k, v in blocks.items() if k != "hf_zero"}}, "hf_zero": own}


def train_case(name: str, run: Run, blocks: dict[str, Any]) -> tuple[Trace, dict[str, torch.Tensor]]:
    """Train a case of ``tests.support.models`` with ``blocks`` in ``zero_optimization``; return its trace and its second moments."""
    import gc

    from hf_zero.utils import safe_get_full_optimizer_state

    case = CASES[name]

    def feed(step: int, micro: int, rank: int) -> Batch:
        return case.rows(step, micro, rank)

    extra = sections(run.stage, blocks)
    extra["zero_optimization"] = {**run.extra.get("zero_optimization", {}), **extra["zero_optimization"]}
    engine = initialize(case.build(), Run(**{**vars(run), "extra": {**run.extra, **extra}}))
    trace = train(engine, feed, case.forward, run)
    moments = {
        parameter_name: safe_get_full_optimizer_state(parameter, "exp_avg_sq").clone()
        for parameter_name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
    engine.destroy()
    del engine
    gc.collect()
    return trace, moments


def compare(name: str, run: Run, only: str = "", part: slice = slice(None)) -> list[str]:
    """Train with and without offload, in a part of the ways whose label has ``only``; return the labels of those that differ in a bit."""
    torch.set_num_threads(1)
    plain, plain_moments = train_case(name, run, {})
    wrong = []
    for label, way in [(label, way) for label, way in ways(run.stage).items() if only in label][part]:
        with blocks_of(way) as blocks:
            trace, moments = train_case(name, run, blocks)
        for what in ("losses", "norms", "skipped"):
            if repr(getattr(trace, what)) != repr(getattr(plain, what)):  # a NaN equals itself here
                wrong.append(f"{label}: {what} {getattr(trace, what)}, without offload {getattr(plain, what)}")
        for what, mine, theirs in (
            ("weights", trace.weights, plain.weights),
            ("masters", trace.masters, plain.masters),
            ("moments", moments, plain_moments),
        ):
            different = [key for key in theirs if not torch.equal(mine[key], theirs[key])]
            if different or mine.keys() != theirs.keys():
                wrong.append(f"{label}: {what} of {different}")
    return [f"rank {ranks.rank()}: {text}" for text in wrong]


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the weights, masters and moments of every parameter, whole. Collective."""
    from hf_zero.utils import safe_get_full_optimizer_state

    trace = collect(engine, Trace())
    found = {f"{name} weight": value for name, value in trace.weights.items()}
    found.update({f"{name} master": value for name, value in trace.masters.items()})
    for name, parameter in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


def differing(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in theirs if not torch.equal(mine[name], theirs[name])]
