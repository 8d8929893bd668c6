"""The `hf-zero` command: what it prints and how it ends."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_zero
from hf_zero.cli import main
from hf_zero.environment import as_text, environment_facts
from tests.support.rows import each

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "cpu_offload": False, "overlap_comm": None},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "fused": True}},
    "autotuning": {"enabled": False, "fast": True},
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows_of(text: str) -> dict[str, dict[str, str]]:
    return {row["key"]: row for row in json.loads(text)["keys"]}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(capsys, "--version")
    assert ended.value.code == 0 and capsys.readouterr().out == f"hf_zero {hf_zero.__version__}\n"


def test_without_a_command_it_says_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert f"hf_zero {hf_zero.__version__}" in out and "served by hf_zero" in out
    for command in ("accelerate launch", "hf-zero launch", "hf-zero explain", "hf-zero report", "hf-zero convert"):
        assert command in out


def test_explain_prints_the_table_and_the_batch_line(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "explain", file, "--world", "2")
    assert (code, err) == (0, "")
    for heading in ("key", "value", "source", "fate", "effect"):
        assert heading in out.splitlines()[1]
    line = next(line for line in out.splitlines() if "zero_optimization.stage " in line)
    assert line.split()[1:4] == ["3", "file", "used"]
    batch = "train_batch_size 8 = train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 1 x data-parallel size 2"
    assert batch in out
    assert "checkpoint.load_universal" not in out, "keys at their default are left out"
    assert max(len(line) for line in out.splitlines()) <= 160


SPLIT = {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 8}


@pytest.mark.parametrize(
    ("config", "words", "line"),
    [
        (SPLIT, (), "2 ranks: pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x sp 1 x tp 2"),
        (SPLIT, ("--world", "4"), "train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 1 x data-parallel size 2"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, (), "data-parallel size 3"),
        ({}, ("--source", "world_size=4"), "data-parallel size 4"),
    ],
)
def test_world_counts_all_ranks(config: dict[str, Any], words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "explain", json.dumps(config), *words)
    assert (code, err) == (0, "") and line in out


@pytest.mark.parametrize(
    "config",
    [
        {"tensor_parallel": {"autotp_size": 3}},
        {"zero_optimization": {"stage": 3, "mics_shard_size": 3}},
        {"pipeline": {"stages": 5}},
        {"sequence_parallel_size": 8},
        {"hf_zero": {"context_parallel_size": 3}},
        {"data_parallel_size": 2},
    ],
    ids=lambda config: next(iter(config)),
)
def test_sizes_that_do_not_fit_the_ranks_are_an_error(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "explain", json.dumps(config), "--world", "4")
    assert code == 1 and "the mesh does not fit the 4 rank(s)" in err


def test_explain_as_json(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", file, "--world", "2", "--json", "--source", "learning_rate=3e-5")
    assert code == 0
    rows = rows_of(out)
    assert rows["optimizer.params.lr"] == {
        "key": "optimizer.params.lr", "value": "3e-05", "source": "auto <- learning_rate", "fate": "used", "effect": "Base learning rate",
    }  # fmt: skip
    assert rows["gradient_accumulation_steps"]["source"] == "default (auto: gradient_accumulation_steps not given)"
    assert rows["zero_optimization.overlap_comm"] | {"effect": ""} == {
        "key": "zero_optimization.overlap_comm", "value": "true", "source": "default", "fate": "used", "effect": "",
    }  # fmt: skip
    assert rows["optimizer.params.fused"]["fate"] == "used"
    assert rows["autotuning.fast"]["effect"] == "not read while `autotuning.enabled` is false"
    assert json.loads(out)["batch"]["train_batch_size"] == 8


def test_explain_all_lists_every_plain_key(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "explain", file, "--json", "--all")
    rows = rows_of(out)
    assert len(rows) > 450
    assert rows["checkpoint.load_universal"]["source"] == "default"
    assert not [key for key, row in rows.items() if row["fate"] == "refused"], "a default never asks for what is refused"


def test_explain_takes_sizes_from_a_model(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_embd=48).save_pretrained(tmp_path / "model")
    code, out, _ = run(capsys, "explain", file, "--json", "--model", str(tmp_path / "model"))
    assert code == 0
    assert rows_of(out)["zero_optimization.reduce_bucket_size"]["value"] == "2304"


def test_explain_reads_text_and_base64(capsys: pytest.CaptureFixture[str]) -> None:
    text = '{"zero_optimization": {"stage": 2}}'
    for source in (text, base64.urlsafe_b64encode(text.encode()).decode()):
        code, out, _ = run(capsys, "explain", source, "--json")
        assert (code, rows_of(out)["zero_optimization.stage"]["value"]) == (0, "2")


def test_explain_shows_the_table_and_the_faults_of_a_bad_config(capsys: pytest.CaptureFixture[str]) -> None:
    bad = '{"zero_optimization": {"stage": 2, "overlap_com": true, "legacy_stage1": true}}'
    code, out, err = run(capsys, "explain", bad)
    assert code == 1
    assert "zero_optimization.stage" in out
    assert err.count("zero_optimization.overlap_com`") == 1
    assert "did you mean `zero_optimization.overlap_comm`" in err
    assert err.count("zero_optimization.legacy_stage1") == 1
    line = next(line for line in out.splitlines() if "legacy_stage1" in line)
    assert "refused" in line


def test_explain_strict(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "explain", '{"mine": 1}')
    assert code == 0
    assert "warning: `mine`" in out
    code, out, err = run(capsys, "explain", '{"mine": 1}', "--strict")
    assert code == 1
    assert "`mine`" in err


FAULTS = (
    (["explain", "absent.json"], 1, "absent.json"),
    (["explain", "{}", "--model", "/no/such/model"], 1, "/no/such/model"),
    (["explain", "{}", "--source", "learning_rat=1"], 1, "learning_rate"),
    (["explain"], 2, "config"),
    (["explain", "{}", "--world", "0"], 2, "1 or more"),
    (["explain", "{}", "--world", "two"], 2, "two"),
    (["explain", "{}", "--source", "lr"], 2, "NAME=VALUE"),
    (["train"], 2, "train"),
)


def test_faults_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    def check(row: tuple[list[str], int, str]) -> None:
        arguments, expected, words = row
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse's
            code = int(end.code or 0)
        said = capsys.readouterr()
        assert (code, said.out) == (expected, "") and said.err.count(words) >= 1 and "Traceback" not in said.err, said.err

    each(FAULTS, check)


def test_a_fault_ends_the_process_without_traceback() -> None:
    arguments, code, words = FAULTS[0]
    done = subprocess.run([sys.executable, "-m", "hf_zero", *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_SECRET_TOKEN", "abc123")
    code, out, err = run(capsys, "report")
    assert (code, err) == (0, "")
    for group in ("hf_zero", "torch", "devices", "deepspeed", "libraries", "variables"):
        assert f"{group}:" in out.splitlines()
    assert torch.__version__ in out
    assert "gloo" in out
    assert "real DeepSpeed installed" in out
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" in out
    assert "abc123" not in out, "secrets stay out of bug reports"


def test_report_of_an_empty_environment() -> None:
    facts = environment_facts({})
    assert facts["variables"] == {}
    assert "variables:\n  none" in as_text(facts)
    assert facts["libraries"]["pydantic"]
