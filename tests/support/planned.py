"""Plans beside real jobs of ranks: the bytes that they hold and send."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from tests.support import ranks

LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 211,
    "pad_token_id": 0,
}
MIXTRAL = {**LLAMA, "num_local_experts": 4}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": 96}
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 131, "n_positions": 64}


def plans_of(lines: list[list[str]]) -> list[tuple[int, str, str]]:
    """Return exit status, output and errors of each command line, run in one new process, which keeps its pretended device for life."""
    answers: list[tuple[int, str, str]] = ranks.run_alone(_plans, lines)
    return answers


def _plans(lines: list[list[str]]) -> list[tuple[int, str, str]]:
    from hf_zero.cli import main

    found = []
    for line in lines:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            status = main(["plan", *line])
        found.append((status, out.getvalue(), err.getvalue()))
    return found


def plan(
    model: str,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    samples: int,
    length: int,
    wish: Mapping[str, Any],
    world: int,
    on_host: bool = True,
) -> Any:
    """Return the prediction for a case on ``world`` ranks: CPUs, or devices with torch's reference kernels."""
    from hf_zero.plan.command import settled
    from hf_zero.plan.inputs import Cluster, Hardware, Load, ModelWish
    from hf_zero.plan.models import build_model
    from hf_zero.plan.workers import plan_step

    cluster = Cluster(world, world, on_host)
    built = build_model(ModelWish(model, settings, **wish))
    return plan_step(built, settled(dict(config), samples), cluster, Load(samples, length), Hardware(), "sdpa" if on_host else "reference")


def route_evenly(module: torch.nn.Module) -> None:
    """Make routers choose each expert equally often, as plans assume."""

    def spread(router: Any, _args: Any, result: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        chosen = result[-1]
        return *result[:-1], torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape) % router.num_experts

    for part in module.modules():
        if type(part).__name__.endswith("TopKRouter"):
            part.register_forward_hook(spread)
        if type(part).__name__ == "ListedBlock":
            part.gate.register_forward_hook(_take_turns)


def _take_turns(_gate: Any, _args: Any, scores: torch.Tensor) -> torch.Tensor:
    """Return scores whose two best of each row follow the two best of the row before."""
    rows, count = scores.shape
    places = torch.arange(rows, device=scores.device)
    return sum((100.0 * (2 - k) * torch.nn.functional.one_hot((2 * places + k) % count, count) for k in range(2)), scores)


def engine_of(
    model: str, settings: Mapping[str, Any], config: Mapping[str, Any], samples: int, wish: Mapping[str, Any], device: torch.device
) -> tuple[Any, Any]:
    """Return the planned model, with values, and an engine that trains it; in a job of ranks."""
    import hf_zero
    from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
    from hf_zero.plan.command import settled
    from hf_zero.plan.inputs import ModelWish
    from hf_zero.plan.models import build_model, give_memory

    built = build_model(ModelWish(model, settings, **wish))
    give_memory(built.module, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in [*built.module.parameters(), *built.module.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape).mul_(0.02))
            else:
                tensor.zero_()
    route_evenly(built.module)
    groups = None
    if config.get("sequence_parallel_size", 1) > 1:
        groups = UlyssesSPAttentionHF.register_with_transformers(built.module, None, config["sequence_parallel_size"], samples)
    engine = hf_zero.initialize(model=built.module, config=settled(dict(config), samples), mpu=groups)[0]
    return (replace(built, batch=partial(_slices, built.batch, groups)) if groups is not None else built), engine


def _slices(batch: Any, groups: Any, samples: int, length: int) -> dict[str, Any]:
    """This rank's slices of a batch that the ranks of a group share."""
    from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter

    loader = [batch(samples, length)]
    slices = next(UlyssesSPDataLoaderAdapter(loader, groups.axis.rank, groups.axis.group, groups.axis.world, "cpu"))
    return {**slices, "labels": slices["shift_labels"]}


def bytes_saved(engine: Any) -> int:
    """Return the bytes of tensors in a checkpoint; collective."""
    folder: list[Any] = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0], "saved")
    files = [path.read_bytes() for path in Path(folder[0], "saved").glob("*.safetensors")]
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder[0])
    return sum(len(content) - 8 - int.from_bytes(content[:8], "little") for content in files)


def trained(
    model: str,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    samples: int,
    length: int,
    wish: Mapping[str, Any],
    saves: bool = False,
) -> Any:
    """Return a rank's bytes after two optimizer steps, the bytes sent in the second, and a checkpoint's bytes; in a job of ranks."""
    from hf_zero.comm.collectives import Collectives
    from hf_zero.plan.models import loss_of

    built, engine = engine_of(model, settings, config, samples, wish, torch.device("cpu"))
    networks = [found for found in gc.get_objects() if isinstance(found, Collectives)]
    steps = engine.accumulation.steps

    def step(count: int) -> None:
        engine.accumulation.steps = count
        for _ in range(count):
            engine.backward(loss_of(engine(**built.batch(samples, length))))
            engine.step()

    step(1)
    before = sum(network.sent_bytes for network in networks)
    step(steps)
    assert engine.global_steps == 2
    states = [value for segment in engine.optimizer.segments for value in segment.state.values() if isinstance(value, torch.Tensor)]
    found = {
        "masters": sum(unit.master.nbytes for unit in engine.units if unit.master is not None and unit.master is not unit.shard),
        "parameters": sum((unit.shard if unit.reshards and not unit.pinned else unit.whole.flat).nbytes for unit in engine.units),
        "moments": sum(value.nbytes for value in states),
        "sent": sum(network.sent_bytes for network in networks) - before,
    }
    found["parameters"] += sum(unit.shard.nbytes for unit in engine.units if unit.reshards and unit.pinned)
    loose = [param for param in engine.module.parameters() if not hasattr(param, "_hf_zero_owner")]
    found["parameters"] += sum(param.nbytes for param in loose)
    found["saved"] = bytes_saved(engine) if saves else 0
    engine.destroy()
    return found


def cases_on_ranks(cases: list[dict[str, Any]]) -> list[Any]:
    """Return ``trained`` for each case, one after the other in one job."""
    return [trained(**case) for case in cases]


def run_real(cases: list[dict[str, Any]], world: int) -> list[Any]:
    """Return the bytes that rank 0 holds and sends, per case."""
    return run_all(cases, world)[0]


def run_all(cases: list[dict[str, Any]], world: int) -> list[list[Any]]:
    """Return the bytes that each rank holds and sends, per case."""
    answers: list[list[Any]] = ranks.run_ranks(cases_on_ranks, world, cases, timeout=1200.0)
    return answers


def key(case: Mapping[str, Any]) -> str:
    """Return the JSON text of a case's model, configuration and wish, which identifies the case in files of results."""
    return json.dumps({name: case[name] for name in ("model", "config", "wish")})


def peak_on_device(
    model: str, settings: Mapping[str, Any], config: Mapping[str, Any], samples: int, length: int, wish: Mapping[str, Any]
) -> Any:
    """Return the allocator's peak in the second optimizer step on the pretend accelerator; in a job of ranks."""
    from hf_zero.plan.models import loss_of

    device = ranks.device()
    gc.collect()
    base = torch.accelerator.memory_allocated(device)
    built, engine = engine_of(model, settings, config, samples, wish, device)
    for count in (1, engine.accumulation.steps):
        engine.accumulation.steps = count
        gc.collect()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats(device)
        for _ in range(count):
            batch = {name: value.to(device) for name, value in built.batch(samples, length).items()}
            with torch.autograd.graph.save_on_cpu() if built.moves else nullcontext():
                loss = loss_of(engine(**batch))
                engine.backward(loss)
            del loss, batch
            engine.step()
    peak = torch.accelerator.max_memory_allocated(device) - base
    engine.destroy()
    return peak


def peaks_on_ranks(cases: list[dict[str, Any]]) -> list[Any]:
    """Return ``peak_on_device`` for each case, one after the other in one job."""
    return [peak_on_device(**case) for case in cases]


def planned_peaks(cases: list[dict[str, Any]], world: int) -> list[int]:
    """Return the peaks that plans of a device with torch's reference kernels predict, from a process of their own."""
    peaks: list[int] = ranks.run_alone(_planned_peaks, cases, world, timeout=1200.0)
    return peaks


def _planned_peaks(cases: list[dict[str, Any]], world: int) -> list[int]:
    found = [plan(**case, world=world, on_host=False) for case in cases]
    return [told.peaks["device"].nbytes for told in found]


def real_peaks(cases: list[dict[str, Any]], world: int) -> list[int]:
    """Return the allocator's peaks on the pretend accelerator, of the rank with the largest."""
    from tests import pretend
    from tests.pretend import network

    env = {"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": network.NAME}
    found = ranks.run_ranks(peaks_on_ranks, world, cases, env=env, timeout=1500.0)
    return [max(peaks) for peaks in zip(*found, strict=True)]
