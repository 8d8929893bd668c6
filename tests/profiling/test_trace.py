"""`hf-zero trace`: rows and shares of recordings made by hand, and of a real step of two ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_zero.cli import main
from hf_zero.profiling.overlap import COMPUTE, RowTotal, Span, difference, intersection, length, overlap_of, union
from hf_zero.profiling.recordings import read_recordings
from tests.support import parity, ranks
from tests.support.models import CASES
from tests.support.parity import Run

GPT2 = CASES["gpt2"]


def _row(name: str, begin: float, took: float, kind: str = "user_annotation", tid: int = 1, **args: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "pid": 1, "tid": tid, "ts": begin, "dur": took, "args": args}


HOST = [
    _row("hf_zero::phase forward", 0, 100),
    _row("hf_zero::issued all_gather (h.0)", 0, 1),
    _row("hf_zero::wait all_gather (h.0)", 5, 5),  # 0 to 10, nothing computed
    _row("hf_zero::pre_forward (h.0)", 2, 10),
    _row("hf_zero::issued all_gather (h.1)", 10, 1),
    _row("aten::mm", 20, 30, "cpu_op"),
    _row("aten::add", 25, 5, "cpu_op"),
    _row("hf_zero::wait all_gather (h.1)", 60, 10),  # 10 to 70, of which 30 behind compute
    _row("hf_zero::post_forward (h.0)", 70, 1),
    _row("hf_zero::phase step", 100, 100),
    _row("hf_zero::issued reduce_scatter (h.1)", 100, 1),
    _row("aten::mul", 110, 10, "cpu_op"),
    _row("hf_zero::wait reduce_scatter (h.1)", 130, 10),
    _row("hf_zero::wait vote (another round)", 140, 5),
    _row("hf_zero::issued all_reduce (another round)", 141, 1),
    _row("hf_zero::wait all_reduce (another round)", 142, 2),  # a message of the vote
    _row("hf_zero::update", 150, 40),
    _row("aten::copy_", 160, 10, "cpu_op"),  # a part of the update
]

DEVICE = [
    _row("hf_zero::phase forward", 0, 50),
    _row("hf_zero::pre_forward (h.0)", 1, 1),
    _row("cudaLaunchKernel", 5, 1, "cuda_runtime", correlation=7),
    _row("hf_zero::issued all_gather (h.1)", 7, 1),
    _row("cudaLaunchKernel", 10, 1, "cuda_runtime", correlation=8),
    _row("ncclDevKernel_AllGather_RING_LL", 100, 40, "kernel", 20, correlation=7),
    _row("sm90_gemm", 120, 60, "kernel", 7, correlation=8),
    _row("Memcpy HtoD (Pinned -> Device)", 170, 20, "gpu_memcpy", 9, correlation=9),
    _row("ncclDevKernel_ReduceScatter_Sum_bf16", 200, 10, "kernel", 20, correlation=10),
]


def _write(path: Path, rows: list[dict[str, Any]], **more: Any) -> None:
    text = json.dumps({"traceEvents": [*rows, {"ph": "M", "name": "process_name"}], **more}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def test_rows_of_a_host(tmp_path: Path) -> None:
    _write(tmp_path / "any.json", HOST, distributedInfo={"rank": 3}, baseTimeNanoseconds=5000)
    (recording,) = read_recordings(tmp_path)
    found = overlap_of(recording)
    assert recording.rank == found.rank == 3 and (found.begin, found.end) == (5, 205)
    assert found.rows["gathers"] == [Span("all_gather (h.0)", 5, 15), Span("all_gather (h.1)", 15, 75)]
    assert found.total("gathers") == RowTotal(70, 30, 15)
    assert found.total("reductions") == RowTotal(40, 10, 10)
    assert found.total("votes") == RowTotal(5, 0, 5)
    assert found.total("host updates") == RowTotal(40, 0, 0)
    assert found.rows[COMPUTE] == [Span("h.0", 25, 55), Span("step", 115, 125)]


def test_rows_of_a_device(tmp_path: Path) -> None:
    _write(tmp_path / "rank_1.json.gz", DEVICE)
    (recording,) = read_recordings(tmp_path)
    found = overlap_of(recording)
    assert recording.rank == 1
    assert found.rows["gathers"] == [Span("all_gather (h.1)", 100, 140)] and found.rows[COMPUTE] == [Span("h.0", 120, 180)]
    assert found.total("gathers") == RowTotal(40, 20, 0) and found.total("reductions").exposed == 10
    assert found.total("copies") == RowTotal(20, 10, 0) and found.total("copies").exposed == 10


def _train(folder: str, how: str) -> list[str]:
    """Three steps at stage 3, the last but one recorded by the configuration or by torch.profiler; labels of units."""
    own = {"hf_zero": {"trace_folder": folder, "trace_step": 1}} if how == "configuration" else {}
    engine = parity.initialize(GPT2.build(), Run(3, extra=own))
    for step in range(3):
        batch = GPT2.rows(step, ranks.rank())
        if how == "profiler" and step == 1:
            with profile(activities=[ProfilerActivity.CPU]) as recorded:
                engine.backward(GPT2.forward(engine, batch))
                engine.step()
            Path(folder).mkdir(exist_ok=True)
            recorded.export_chrome_trace(f"{folder}/rank{ranks.rank()}.json")
        else:
            engine.backward(GPT2.forward(engine, batch))
            engine.step()
    names = [unit.name for unit in engine.units]
    engine.destroy()
    return names


def _train_both(folder: str) -> list[str]:
    _train(f"{folder}/configuration", "configuration")
    return _train(f"{folder}/profiler", "profiler")


def test_a_step_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    units = ranks.run_ranks(_train_both, 2, str(tmp_path))[0]
    for how in ("configuration", "profiler"):
        folder = tmp_path / how
        assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank1.json"]
        for recording in read_recordings(folder):
            found = overlap_of(recording)
            gathered = {span.label for span in found.rows["gathers"]}
            assert gathered == {f"all_gather ({unit})" for unit in units}
            assert {span.label for span in found.rows["reductions"]} >= {f"reduce_scatter ({unit})" for unit in units}
            assert {"transformer.h.0", "backward of transformer.h.1"} <= {span.label for span in found.rows[COMPUTE]}
            for row in ("gathers", "reductions", "host updates"):
                total = found.total(row)
                assert 0 < total.total <= found.end - found.begin and 0 <= total.hidden <= total.total
        assert main(["trace", str(folder)]) == 0
        told = capsys.readouterr().out
        assert "rank 0: " in told and "rank 1: " in told and "gathers" in told and "host updates" in told
        written = json.loads((folder / "overlap.json").read_text())["traceEvents"]
        named = {event["args"]["name"] for event in written if event["ph"] == "M" and "name" in event["args"]}
        assert named >= {"rank 0", "rank 1", "compute", "gathers"}
        assert all(event["ts"] >= 0 for event in written if event["ph"] != "M")
        assert (folder / "overlap.png").stat().st_size > 5000
        assert main(["trace", str(folder), "--no-plot", "--out", str(folder / "again")]) == 0
        assert [path.name for path in (folder / "again").iterdir()] == ["overlap.json"]
        capsys.readouterr()


def test_folders_that_hold_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> str:
        assert main(["trace", str(tmp_path), "--no-plot"]) == 1
        return capsys.readouterr().err

    assert "contains no recording" in refused()
    (tmp_path / "a.json").write_text("[1, 2")
    assert "cannot read" in refused() and not (tmp_path / "overlap.json").exists()
    _write(tmp_path / "a.json", [_row("aten::mm", 0, 1, "cpu_op")])
    assert "no phases of hf_zero" in refused()
    _write(tmp_path / "a.json", HOST, distributedInfo={"rank": 0})
    _write(tmp_path / "b.json", HOST, distributedInfo={"rank": 0})
    assert "several recordings of one rank" in refused()
    assert main(["trace", str(tmp_path / "nowhere")]) == 1 and "is not a folder" in capsys.readouterr().err


def test_sets_of_time_against_every_moment() -> None:
    torch.manual_seed(0)
    for _ in range(50):
        left, right = ([(int(begin), int(begin + took)) for begin, took in torch.randint(0, 12, (6, 2))] for _ in range(2))
        moments = [{time for begin, end in side for time in range(begin, end)} for side in (left, right)]
        mine, theirs = union(left), union(right)
        assert length(mine) == len(moments[0])
        assert length(intersection(mine, theirs)) == len(moments[0] & moments[1])
        assert length(difference(mine, theirs)) == len(moments[0] - moments[1])
