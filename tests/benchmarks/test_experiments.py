"""The comparison of the experiments: what it measures, its table and drawing, and a whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.experiments import compare, measured
from tests.support.examples import EXAMPLES, RUN_SECONDS, TEST_SECONDS, run

SCRIPT = EXAMPLES / "text_classification" / "run_cls_no_trainer.py"


@pytest.mark.parametrize(
    ("stage", "sixteen_bit", "bytes_per_parameter"),
    [
        (None, False, 12),
        (None, True, 12),
        (0, False, 12),
        (1, False, 4 + 8 / 4),
        (2, False, 4 + 8 / 4),
        (3, False, 12 / 4),
        (0, True, 14),
        (1, True, 2 + 12 / 4),
        (2, True, 2 + 12 / 4),
        (3, True, 14 / 4),
    ],
)
def test_state_bytes_by_stage(stage: int | None, sixteen_bit: bool, bytes_per_parameter: float) -> None:
    found = measured.expected_state_bytes(1000, stage=stage, ranks=4, sixteen_bit=sixteen_bit)
    assert found == 1000 * bytes_per_parameter


def test_measured_state_counts_each_memory_block_once() -> None:
    model = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert measured.measured_state_bytes(model, optimizer) == 400
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    step_counter = 4
    assert measured.measured_state_bytes(model, optimizer) == 1200 + step_counter


def row(stage: int | None, seconds: float | None) -> compare.Comparison:
    epoch = {"steps": 5, "train_seconds": seconds, "eval_seconds": 0.5, "epoch_train_loss": 2.0, "f1": 0.75}
    facts = {"ranks": 2, "device": "cpu", "precision": "fp32", "parameters": 10, "peak_memory_bytes": 2**20, "state_bytes": 2**19}
    run = None if seconds is None else {"steps_per_epoch": 10, "epochs": [epoch], "measured": facts}
    return compare.Comparison(compare.method_name(stage), run)


def arguments(folder: Path, *flags: str) -> tuple[object, list[str]]:
    return compare.parse_arguments([str(SCRIPT), "--output_dir", str(folder), *flags])


def test_comparison_is_a_table_and_a_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args, flags = arguments(tmp_path, "--per_device_eval_batch_size", "16", "--seed", "3")
    assert flags == ["--per_device_eval_batch_size", "16", "--seed", "3"]
    compare.write_comparison(args, [row(None, None), row(2, 3.25), row(3, 4.0)])
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    assert lines[0].startswith("| Method | Batch size per rank | Eval size per rank | Train time per epoch (s) |")
    assert lines[2] == "| DDP | - | - | out of memory | - | - | - | - |"
    assert lines[3] == "| ZeRO stage 2 | 8 | 16 | 6.50 | 0.50 | 1.0 | 0.5 | 0.750 |"
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "ZeRO stage 3" in capsys.readouterr().out


def test_methods_that_run_out_of_memory_get_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []

    def launch(command: list[str], log: Path, *, whole_init: bool) -> int:
        assert whole_init
        log.write_text("torch.OutOfMemoryError: CUDA out of memory")
        started.append(command)
        return 1

    monkeypatch.setattr(compare, "launch", launch)
    monkeypatch.setenv("RANKS", "3")
    assert compare.compare(*arguments(tmp_path, "--seed", "3")) == 0
    assert [command[command.index("--num_processes") + 1] for command in started] == ["3"] * 4
    assert [Path(command[-1]).name for command in started] == ["ddp", "zero1", "zero2", "zero3"]
    assert (tmp_path / "comparison.md").read_text().count("out of memory") == 4
    assert json.loads((tmp_path / "zero3" / "ds.json").read_text())["zero_optimization"]["stage"] == 3
    assert not (tmp_path / "ddp" / "ds.json").exists()


def test_failed_comparison_ends_with_the_runs_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(command: list[str], log: Path, *, whole_init: bool) -> int:
        assert not whole_init  # a pretrained model
        log.write_text("ValueError: no such thing")
        return 7

    monkeypatch.setattr(compare, "launch", launch)
    assert compare.compare(*arguments(tmp_path, "--model_name_or_path", "folder")) == 7
    assert str(tmp_path / "ddp" / "log.txt") in capsys.readouterr().out
    assert not (tmp_path / "comparison.md").exists()


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_comparison_does_the_same_job_four_times(tmp_path: Path) -> None:
    lines = [f"say {index},{index} is {'even' if index % 2 else 'odd'},{index % 2}" for index in range(200)]
    (tmp_path / "pairs.csv").write_text("\n".join(["sentence1,sentence2,label", *lines]) + "\n")
    flags = ["--output_dir", str(tmp_path), "--num_train_epochs", "1", "--train_file", str(tmp_path / "pairs.csv"), "--seed", "3"]
    flags += ["--num_hidden_layers", "1", "--hidden_size", "32", "--num_attention_heads", "2", "--vocab_size", "600"]
    words = ["-m", "benchmarks.experiments.compare", str(SCRIPT), *flags, "--learning_rate", "1e-2"]
    printed = run(words, cache=tmp_path / "cache", seconds=2 * RUN_SECONDS)
    found = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("ddp", "zero1", "zero2", "zero3")]
    assert [run["measured"]["stage"] for run in found] == [None, 1, 2, 3]
    epochs = [run["epochs"][-1] for run in found]
    assert all(epoch["epoch_train_loss"] == pytest.approx(epochs[0]["epoch_train_loss"], rel=1e-5) for epoch in epochs)
    assert all((epoch["f1"], epoch["accuracy"]) == pytest.approx((epochs[0]["f1"], epochs[0]["accuracy"])) for epoch in epochs)
    facts = found[3]["measured"]
    assert (facts["ranks"], facts["backend"], facts["precision"]) == (2, "gloo", "fp32")
    expected = measured.expected_state_bytes(facts["parameters"], stage=3, ranks=2, sixteen_bit=False)
    assert facts["state_bytes"] == pytest.approx(expected, rel=0.03)
    assert facts["state_bytes"] < 0.6 * found[0]["measured"]["state_bytes"]
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    assert "ZeRO stage 3" in (tmp_path / "comparison.md").read_text()
    assert "comparison.png" in printed
