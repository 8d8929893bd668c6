"""The log of collectives: what is counted, the bandwidths, and that nothing changes but the log."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_zero.deepspeed
from hf_zero.comm import comms_log
from hf_zero.comm.comms_log import CommsLog, CommsLogSettings, CommsRow, DeviceWatch, HostWatch, Kind, Tally, operations_named, table_text
from hf_zero.errors import ConfigError
from tests.support import ranks
from tests.support.models import CASES

hf_zero.deepspeed.install_as_deepspeed()  # before other libraries look whether there is one

MIB = 2**20


def row(operation: str, ranks_: int, nbytes: int, seconds: float) -> CommsRow:
    return CommsRow(Kind(operation, ranks_, nbytes), Tally(1, seconds, seconds))


@pytest.mark.parametrize(
    ("operation", "share"),
    [("all_gather", 3 / 4), ("reduce_scatter", 3 / 4), ("all_to_all", 3 / 4), ("all_reduce", 6 / 4), ("broadcast", 1)],
)
def test_bandwidths(operation: str, share: float) -> None:
    one = row(operation, 4, 1000, 0.5)
    assert one.algorithm_bandwidth == 2000 and one.bus_bandwidth == pytest.approx(2000 * share)


def test_names_of_operations() -> None:
    assert operations_named(["all_gather_into_tensor", "all_reduce", "barrier", "all_to_all_single"]) == {
        "all_gather",
        "all_reduce",
        "all_to_all",
    }
    with pytest.raises(ConfigError, match="comms_logger.prof_ops names 'allreduce'.*all_reduce"):
        operations_named(["all_gather", "allreduce"])


class Clock(HostWatch):
    """Ticks a second at every look."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time


def test_latency_and_wait_are_told_apart(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("hf_zero"), "propagate", True)
    caplog.set_level(logging.INFO, logger="hf_zero")
    log, clock = CommsLog(CommsLogSettings(frozenset({"all_gather"}), verbose=True, debug=True)), Clock()
    assert log.begin("all_reduce", "norm", 8, 2, clock) is None, "not among the operations"
    call = log.begin("all_gather", "layers.0", 4 * MIB, 2, clock)
    assert call is not None
    clock.now()  # something else goes on
    call.waits = clock.now()
    log.end(call)
    assert log.tallies == {Kind("all_gather", 2, 4 * MIB, "layers.0"): Tally(1, 3.0, 1.0)}
    assert "comm op: all_gather | layers.0 | 2 ranks | msg size: 4 MiB | time: 3000.000 ms, waited 1000.000 ms" in caplog.text
    text = table_text(log.rows())
    assert text.splitlines()[0].startswith("operation") and "all_gather (layers.0)" in text and "4 MiB" in text
    assert "last to arrive" not in text
    log.clear()
    assert not log.rows()


class FakeDevice:
    """A device module whose events are reached when ``reached`` says so; its streams note what waits on them."""

    def __init__(self) -> None:
        self.time, self.reached, self.current, self.waited_on = 0.0, False, "compute", []
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                device.time += 1.0
                self.time, self.stream = device.time, stream

            def query(self) -> bool:
                return device.reached

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return 1000 * (end.time - self.time)

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.name = "side"

        self.Event, self.Stream = Event, Stream

    def current_stream(self, device: torch.device) -> str:
        return self.current

    def stream(self, stream: Any) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def inside() -> Any:
            before, self.current = self.current, stream.name
            yield
            self.current = before

        return inside()


def test_times_of_a_device_come_from_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    watch = DeviceWatch(torch.device("cuda"))
    log = CommsLog(CommsLogSettings())
    call = log.begin("all_gather", "layers.0", MIB, 2, watch)
    assert call is not None
    call.ended = watch.end_of([SimpleNamespace(wait=lambda: fake.waited_on.append(fake.current)), None])
    assert fake.waited_on == ["side"] and call.ended.stream == "side", "the compute stream waits for nothing"
    watch.now()
    call.waits = watch.now()
    log.end(call)
    assert not log.tallies, "the device has not come so far"
    assert log.counted() == {Kind("all_gather", 2, MIB): Tally(1, 1.0, 1.0)}, "asking for the table waits"


def test_the_last_to_arrive_waits_least() -> None:
    kind, lone = Kind("all_reduce", 3, 8), Kind("broadcast", 3, 4)
    log = CommsLog(CommsLogSettings(), {kind: Tally(2, 0.5, 0.5), lone: Tally(1, 0.1, 0.1)})
    others = [log.seconds_by_kind(), {("all_reduce", 3, 8, ""): 0.1}, {("all_reduce", 3, 8, ""): 0.4}]
    one, two = log.rows(others)
    assert (one.kind, one.fastest, one.least) == (kind, 1, 0.1) and (two.kind, two.fastest, two.least) == (lone, 0, 0.1)
    lines = table_text([one, two]).splitlines()
    assert lines[0].endswith("straggler ms  last to arrive") and lines[1].split()[-3:] == ["400.000", "rank", "1"]


def _run(stage: int, section: dict[str, Any] | None, straggler: bool = False) -> dict[str, Any]:
    """Two steps of GPT-2; what was recorded, what was noted, and what ``log_summary`` prints and returns."""
    import io
    from contextlib import redirect_stdout

    import hf_zero
    from hf_zero.observe import record_labels

    comms_log.stop_log()
    hf_zero.install_as_deepspeed()
    deepspeed = importlib.import_module("deepspeed")
    case = CASES["gpt2"]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
        **({"comms_logger": section} if section else {}),
    }
    engine, *_ = deepspeed.initialize(model=case.build(), config=config)
    log, rank = comms_log.current_log(), torch.distributed.get_rank()
    if log is not None:
        log.clear()
    losses = []
    with record_labels() as labels:
        for step in range(2):
            loss = engine(**case.rows(step, rank)).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    printed = io.StringIO()
    with redirect_stdout(printed):
        numbers = deepspeed.comm.log_summary(show_straggler=straggler, return_dict=True)
    comms_log.stop_log()
    sizes = {unit.name: unit.layout.padded_numel * 4 for unit in engine.units}
    return {
        "losses": losses,
        "labels": [label.removeprefix("hf_zero::") for label in labels],
        "printed": printed.getvalue(),
        "numbers": numbers,
        "class": type(engine.collectives).__name__,
        "sizes": sizes,
        "sent": engine.collectives.sent_bytes,
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_collective_of_a_step_is_counted(stage: int) -> None:
    plain = ranks.run_ranks(_run, 2, stage, None)
    logged = ranks.run_ranks(_run, 2, stage, {"enabled": True})
    assert {answer["class"] for answer in plain} == {"GlooCollectives"} and plain[0]["numbers"] == {}
    for before, after in zip(plain, logged, strict=True):
        assert (after["losses"], after["labels"], after["sent"]) == (before["losses"], before["labels"], before["sent"])
        for operation in ("all_gather", "reduce_scatter", "all_reduce"):
            noted = sum(label.startswith(f"{operation} ") for label in after["labels"])
            assert sum(entry["count"] for entry in after["numbers"].get(operation, {}).values()) == noted
        gathered = set(after["numbers"].get("all_gather", {}))
        assert gathered == (set(after["sizes"].values()) if stage else set())
        entry = next(iter(after["numbers"]["all_reduce"].values()))
        assert 0 < entry["waited_ms"] <= entry["total_latency_ms"] + 1e-6 and entry["busbw_avg_gbps"] > 0
    assert "all_reduce" in logged[0]["printed"] and "busbw Gbit/s" in logged[0]["printed"] and not logged[1]["printed"]


def test_chosen_operations_by_caller_and_rank() -> None:
    section = {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"], "debug": True}
    answers = ranks.run_ranks(_run, 2, 3, section, True)
    for answer in answers:
        votes = {"all_reduce (another round, forward)", "all_reduce (late gradients, backward)", "all_reduce (micro-steps, step)"}
        votes.add("all_reduce (behind the forward, backward)")
        assert set(answer["numbers"]) == {"all_reduce (gradient norm, step)", *votes}
    for name in answers[0]["numbers"]:
        own, other = (next(iter(answer["numbers"][name].values())) for answer in answers)
        last = own["last_to_arrive"]
        assert last == other["last_to_arrive"] and (own, other)[last]["straggler_ms"] == 0 <= (other, own)[last]["straggler_ms"]
    assert "last to arrive" in answers[0]["printed"]


def test_configured_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = importlib.import_module("deepspeed.comm")
    monkeypatch.setattr(comms_log, "_current", None)
    comm.configure(enabled=True, prof_all=False, prof_ops=["broadcast"], verbose=True)
    log = comms_log.current_log()
    assert log is not None and log.settings == CommsLogSettings(frozenset({"broadcast"}), verbose=True)
    comm.configure({"comms_logger": {"enabled": True, "debug": True}})
    assert comms_log.current_log() is log and log.settings == CommsLogSettings(debug=True)
    comm.configure(enabled=False)
    assert comms_log.current_log() is None and comm.log_summary() is None
    with pytest.raises(ConfigError, match="prof_ops"):
        comm.configure(enabled=True, prof_all=False, prof_ops=["everything"])
