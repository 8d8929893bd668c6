"""What `hf_zero.step_metrics` tells: exact tokens and operations, waits that were made, memory that is held; and it changes no number."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.comm.comms_log import HostWatch
from hf_zero.metrics import Sink
from hf_zero.profiling import step_metrics
from hf_zero.profiling.costs import ModelOperations, OperationCounter
from hf_zero.profiling.step_metrics import PEAK_TFLOPS, batch_size, peak_tflops
from hf_zero.profiling.waits import PREFIX, WAITS, WaitTimes, slow_ranks
from tests import pretend
from tests.pretend import network
from tests.support import parity, ranks, trainers
from tests.support.models import CASES, LENGTH
from tests.support.parity import Run
from tests.support.processes import until

GPT2 = CASES["gpt2"]


class Records(Sink):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def write(self, record: Any, step: int) -> None:
        self.found.append(dict(record))

    def close(self) -> None: ...


def _engine(stage: int, model: nn.Module | None = None, zero: dict[str, Any] | None = None, **own: Any) -> tuple[Any, Records]:
    run = Run(stage, accumulation=2, extra={"hf_zero": own, "zero_optimization": zero or {}})
    engine = parity.initialize(model or GPT2.build(), run)
    engine.reports.sinks.append(records := Records())
    return engine, records


def _step(engine: Any, step: int) -> float:
    for micro in range(2):
        loss = GPT2.forward(engine, GPT2.rows(step, micro, ranks.rank()))
        engine.backward(loss)
        engine.step()
    return loss.item()


def check_speed() -> None:
    """Operations are those of forward and backward without what checkpointing repeats; tokens those of the batches."""
    plain = GPT2.build()
    with OperationCounter() as forward:
        loss = GPT2.forward(plain, GPT2.rows(0, 0, 0))
    with OperationCounter() as backward:
        loss.backward()
    needed = 2 * (forward.total + backward.total)
    for stage, checkpointing in ((0, False), (3, False), (3, True)):
        model = GPT2.build()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train(stage > 0)  # a model in eval mode trains too, as one of `from_pretrained` does
        engine, records = _engine(stage, model, step_metrics=2, peak_tflops=0.5)
        for step in range(4):
            _step(engine, step)
        told = [found for found in records.found if "Train/Speed/mfu" in found]
        assert len(records.found) == 4 and told == [records.found[1], records.found[3]]
        for found in told:
            seconds = found["Train/Speed/seconds_per_step"]
            assert math.isclose(found["Train/Speed/tokens_per_second_per_rank"] * seconds, 2 * 2 * LENGTH)
            assert math.isclose(found["Train/Speed/tflops_per_rank"] * seconds * 1e12, needed), (stage, checkpointing)
            assert math.isclose(found["Train/Speed/mfu"], found["Train/Speed/tflops_per_rank"] / 0.5)
            assert found["Train/Memory/host_bytes"] > 1e8 and found["Train/Memory/disk_bytes"] == 0
        engine.destroy()


class Clock:
    """A clock that only a test moves, in place of the host's; it knows whether this rank is inside a wait that is timed."""

    def __init__(self) -> None:
        self.seconds, self.waits, self._inside, self._lock = 0.0, 0, False, threading.Lock()

    def perf_counter(self) -> float:
        return self.seconds

    def of_wait(self, _watch: HostWatch) -> float:
        """Return the time at the begin or the end of a wait, which are asked for in turn."""
        with self._lock:
            self._inside = not self._inside
            self.waits += self._inside
            return self.seconds

    def move_inside_a_wait(self, seconds: int) -> None:
        """Move on, from another thread, while this rank is inside waits: at least by ``seconds`` inside one of them."""
        which = moved = 0
        while moved < seconds:
            with self._lock:
                if self._inside:
                    which, moved = self.waits, moved + 1 if which == self.waits else 1
                    self.seconds += 1.0
            time.sleep(0.001)

    @contextmanager
    def installed(self) -> Iterator[None]:
        with mock.patch.object(step_metrics, "time", self), mock.patch.object(HostWatch, "now", lambda watch: self.of_wait(watch)):
            yield


def check_waits(folder: Path) -> None:
    """Rank 1 is late in forward and in its data: rank 0 stands in waits for it, and what belongs to no step is left out."""
    clock, forwards = Clock(), 2 * 2
    late, passed = [[folder / f"{kind}{number}" for number in range(forwards)] for kind in ("late", "passed")]

    def hold() -> None:
        """Rank 0's clock moves while rank 1 stands in its forward, inside of what rank 0 waits in."""
        for come, go in zip(late, passed, strict=True):
            until(come.exists, come.name)
            clock.move_inside_a_wait(10)
            go.touch()

    def stand(*_: Any) -> None:
        number = next(numbers)
        late[number].touch()
        until(passed[number].exists, passed[number].name)

    with clock.installed():
        engine, records = _engine(3, step_metrics=2)
        numbers, holding = iter(range(forwards)), threading.Thread(target=hold)
        if ranks.rank():
            handle = engine.module.transformer.h[0].register_forward_pre_hook(stand)
        else:
            holding.start()
        _step(engine, 0)
        if ranks.rank():
            clock.seconds += 100
        _step(engine, 1)
        found, waited = records.found[-1], ("gathers", "reductions", "votes")
        assert found[f"{PREFIX}least_rank"] == 1 and found[f"{PREFIX}least"] == 0
        assert math.isclose(found[f"{PREFIX}median"], 0.5, rel_tol=1e-6)  # the sum of several kinds of waits may be rounded
        if ranks.rank():
            assert found["Train/Waited/data"] == found["Train/Speed/seconds_per_step"] == 100
            handle.remove()
        else:
            holding.join()
            assert found["Train/Speed/seconds_per_step"] == sum(found[f"Train/Waited/{kind}"] for kind in waited) >= 20
            assert found["Train/Waited/data"] == 0
        engine.eval()
        with torch.no_grad():
            clock.seconds += 200
            GPT2.forward(engine, GPT2.rows(0, 0, 0))
            clock.seconds += 200
        engine.train()
        _step(engine, 2)
        clock.seconds += 100
        _step(engine, 3)
        found = records.found[-1]
        assert found["Train/Waited/data"] == found["Train/Speed/seconds_per_step"] == 50, "half of it for each of two steps"
        engine.destroy()


def test_a_rank_that_others_wait_for_is_named_with_its_reasons() -> None:
    nothing = dict.fromkeys(WAITS, 0.0)
    waiting = nothing | {"votes": 0.2, "reductions": 0.1}
    reading = nothing | {"data": 0.25}
    assert [str(found) for found in slow_ranks([waiting, waiting, reading, waiting])] == [
        "rank 2 is slow: it waits for other ranks 0.0 % of a step, the median of the other ranks is 30.0 % "
        "(reductions 0.0 % and 10.0 %, votes 0.0 % and 20.0 %). Waits that other ranks do not cause: data 25.0 % and 0.0 %"
    ]
    assert not list(slow_ranks([waiting] * 8)), "all wait alike, for the network"
    assert [found.rank for found in slow_ranks([nothing, waiting])] == [0]
    assert [found.rank for found in slow_ranks([waiting, nothing, nothing, waiting, waiting])] == [1, 2]


def check_no_number_changes() -> None:
    found = []
    for own in ({}, {"step_metrics": 1}):
        engine, _ = _engine(3, **own)
        losses = [_step(engine, step) for step in range(3)]
        masters = [unit.master.clone() for unit in engine.units]
        found.append((losses, masters))
        engine.destroy()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(left, right) for left, right in zip(found[0][1], found[1][1], strict=True))


def check_disk(folder: str) -> None:
    engine, records = _engine(3, zero={"offload_optimizer": {"device": "nvme", "nvme_path": folder}}, step_metrics=2)
    _step(engine, 0)
    _step(engine, 1)
    elements = sum(segment.range.numel for segment in engine.optimizer.segments)
    shards = sum(unit.master.numel() for unit in engine.units if unit.master is not unit.shard)
    assert records.found[1]["Train/Memory/disk_bytes"] == 8 * elements + 4 * shards > 0
    assert records.found[1]["Train/Waited/offload"] > 0
    engine.destroy()


def check_all(folder: str) -> None:
    check_speed()
    check_waits(Path(folder))
    check_no_number_changes()
    check_disk(folder)


def test_speed_waits_and_memory_on_two_ranks(tmp_path: Path) -> None:
    ranks.run_ranks(check_all, 2, str(tmp_path))


def check_device() -> None:
    class Beside(Records):
        def write(self, record: Any, step: int) -> None:
            super().write({**record, "now": torch.accelerator.memory_allocated()}, step)

    engine, _ = _engine(3, step_metrics=2)
    engine.reports.sinks.append(records := Beside())
    _step(engine, 0)
    _step(engine, 1)
    found = records.found[1]
    assert found["Train/Memory/device_bytes"] == found["now"] > 0
    assert found["Train/Memory/device_peak_bytes"] == torch.accelerator.max_memory_allocated() > found["now"]
    assert "Train/Speed/mfu" not in found and found["Train/Speed/tflops_per_rank"] > 0, "nobody knows this device's peak"
    engine.destroy()


@pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())
def test_memory_of_a_device() -> None:
    env = {"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": network.NAME}
    ranks.run_ranks(check_device, 1, env=env, timeout=120.0)


def check_trainer(models: Path, folder: Path) -> None:
    with trainers.clean_state():
        trainer = trainers.train_with(models, folder, trainers.zero_config(2, hf_zero={"step_metrics": 2}))
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [entry["step"] for entry in logs if "speed/tokens_per_second_per_rank" in entry] == [2, 4]
        assert {"memory/host_bytes", "waited/data", "waited/reductions"} <= logs[1].keys()


def test_trainers_logs_and_so_its_trackers(trainer_models: Path, tmp_path: Path) -> None:
    hf_zero.install_as_deepspeed()
    ranks.run_ranks(check_trainer, 2, trainer_models, tmp_path)


# -- parts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("GRID A100-10C", None),
        ("AMD Instinct MI250X/MI250", None),
        ("NVIDIA GH200 480GB", None),
        ("Pretend accelerator 0", None),
    ],
)
def test_peaks_of_known_devices(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
    assert all(source for _, _, source in PEAK_TFLOPS)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_recomputation_repeats_is_counted_apart(reentrant: bool) -> None:
    """The kind without reentrance stops when it has what backward needs: the second layer's result is not."""
    layers, rows = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.ones(3, 8, requires_grad=True)
    first, second = 2 * 3 * 8 * 16, 2 * 3 * 16 * 4
    with ModelOperations() as counted:
        checkpoint(layers, rows, use_reentrant=reentrant).sum().backward()
    assert (counted.needed, counted.recomputed) == (3 * (first + second), first + second * reentrant)


def test_sizes_of_batches() -> None:
    ids, pixels, embedded = torch.ones(2, 5, dtype=torch.long), torch.ones(4, 3, 8, 8), torch.ones(2, 5, 16)
    assert batch_size((), {"attention_mask": torch.ones(2, 9), "input_ids": ids}) == (10, 2)
    assert batch_size((ids,), {}) == (10, 2)
    assert batch_size((), {"pixel_values": pixels}) == (0, 4)
    assert batch_size((), {"inputs_embeds": embedded, "input_ids": None}) == (10, 2)
    assert batch_size((), {}) == (0, 0)


def test_a_wait_inside_a_wait_counts_once() -> None:
    from hf_zero.observe import waiting

    clock = Clock()
    with clock.installed():
        times = WaitTimes(torch.device("cpu"), blocks_host=True)
        with times.counted(streams=False), waiting("votes", "outer"), waiting("gathers", "inner", on_stream=True):
            clock.seconds += 4
        with waiting("gathers", "nobody counts"):
            clock.seconds += 8
        found = times.take(2)
    assert found["votes"] == 2 and found["gathers"] == 0 and times.take(1)["votes"] == 0
