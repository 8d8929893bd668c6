"""`make gpu`: what it runs again, what it leaves, how a machine without a network gets what it lacks, and that it asks for nothing else."""

from __future__ import annotations

import ast
import gzip
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.common import device_processes, flops, processes
from benchmarks.common.training import build_model
from benchmarks.gpu import parts as gpu
from benchmarks.gpu import results as gpu_results
from benchmarks.steps import step_time_gpu
from tests.support.processes import REPO, run, until

HERE = {"host": "here", "python": "3", "torch": "2", "gpus": []}


def part_of(name: str, code: str, seconds: int = 60, **more: Any) -> gpu.Part:
    return gpu.Part(name, [sys.executable, "-c", code], seconds, **more)


# -- what is run, and when again -------------------------------------------------------------------------------------------


def test_what_compares_values_comes_first_and_side_by_side() -> None:
    listed = gpu.parts("cuda", toy=False)
    together = next(group for group in gpu.groups(listed) if len(group) > 1)
    assert [part.name for part in listed][:3] == ["facts", "kernels", "parity"]
    assert {"parity", "compiled-values", "jobs", "tests", "triton", "ranks"} <= {part.name for part in together}
    after = [part.name for part in listed[listed.index(together[-1]) + 1 :]]
    assert after[:4] == ["compiled", "wide", "lora", "xl-bf16"]
    assert all(len(group) == 1 for group in gpu.groups(listed[listed.index(together[-1]) + 1 :]))
    several = next(part for part in gpu.parts("cuda", toy=False, gpus=4) if part.name == "ranks")
    assert several.command[-2:] == ["2", "4"]


def test_parts_that_compare_values_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meets = "import pathlib, sys, time\nhere = pathlib.Path({folder!r})\n(here / sys.argv[1]).touch()\n"
    meets += "while len(list(here.iterdir())) < 2: time.sleep(0.05)"
    folder = tmp_path / "met"
    folder.mkdir()
    code = meets.format(folder=str(folder))
    chosen = [gpu.Part(name, [sys.executable, "-c", code, name], 60, alone=False) for name in ("one", "two")]
    assert _run_parts(monkeypatch, tmp_path / "out", chosen) == 0
    assert set(json.loads((tmp_path / "out" / "summary.json").read_text())["parts"]) == {"one", "two"}


@pytest.mark.parametrize(
    ("name", "earlier", "again", "expected"),
    [
        ("jobs", None, None, True),
        ("jobs", {"status": 0}, None, False),
        ("jobs", {"status": 1}, None, False),
        ("jobs", {"status": "still running after 20 s", "limit": 20}, None, True),  # the budget had cut it short
        ("jobs", {"status": 0}, ["jobs"], True),
        ("jobs", {"status": 0}, [], False),
        ("jobs", {"status": 1}, [], True),
        ("jobs", {"status": 0, "machine": {"host": "another"}}, None, False),
        ("facts", {"status": 0, "machine": {"host": "another"}}, None, True),
        ("facts", {"status": 0}, None, False),
    ],
)
def test_what_is_run_again(name: str, earlier: dict[str, Any] | None, again: list[str] | None, expected: bool) -> None:
    part = part_of(name, "", of_machine=name == "facts")
    known = None if earlier is None else {"limit": 60, "machine": HERE, **earlier}
    assert gpu.due(part, known, HERE, again) is expected


def test_kernels_are_built_again_where_the_library_has_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    part, built = part_of("kernels", "", of_machine=True), {"status": 0, "limit": 60, "machine": HERE}
    monkeypatch.setattr(gpu, "LIBRARY", tmp_path / "library.so")
    assert gpu.due(part, built, HERE, None)
    gpu.LIBRARY.touch()
    assert not gpu.due(part, built, HERE, None)


# -- what it leaves ---------------------------------------------------------------------------------------------------------

WRITES = """
import json, pathlib, sys
folder = pathlib.Path("{scratch}")
table = {"title": "T", "command": "c", "text": "t", "columns": ["a"], "rows": [["1"]], "figure": ""}
table["machine"] = {"device": "d", "torch": "2", "python": "3", "when": "now"}
(folder / "table.json").write_text(json.dumps(table))
(folder / "trace.json").write_text('{"traceEvents": []}')
print("x" * (1 << 20) + "the end")
"""


def _run_parts(monkeypatch: pytest.MonkeyPatch, out: Path, chosen: list[gpu.Part], *words: str) -> int:
    monkeypatch.setattr(gpu, "parts", lambda *_: chosen)
    monkeypatch.setattr(gpu, "machine", lambda _: HERE)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(out), "--device", "cpu", *words])
    return gpu.main()


def test_the_folder_holds_few_small_files_and_a_line_per_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [part_of(name, WRITES) for name in (f"part{index}" for index in range(9))]
    chosen += [part_of("fails", "print('before'); raise SystemExit('why')"), part_of("hangs", "import time; time.sleep(60)", 1)]
    assert _run_parts(monkeypatch, tmp_path, chosen) == 1
    files = list(tmp_path.iterdir())
    assert len(files) == gpu_results.MOST_FILES and all(file.stat().st_size <= gpu_results.MOST_BYTES for file in files)
    assert (tmp_path / "log.txt").stat().st_size < 12 * gpu_results.LOG_BYTES
    assert gzip.decompress((tmp_path / "part0-timeline.json.gz").read_bytes()) == b'{"traceEvents": []}'
    summary = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert summary["part3"]["status"] == 0 and summary["part3"]["tail"].strip().endswith("the end")
    assert summary["hangs"]["status"] == "still running after 1 s" and summary["fails"]["machine"] == HERE
    assert len(json.loads((tmp_path / "tables.json").read_text())) == 9
    report = (tmp_path / "report.md").read_text()
    assert "| fails | failed (1) |" in report and report.count("# T") == 9
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(chosen)
    assert lines[1].startswith("[1/11] part0: passed in ") and lines[10].startswith("[10/11] fails: failed (1) in ")
    assert lines[10].endswith(": why")
    assert _run_parts(monkeypatch, tmp_path, chosen) == 1
    assert capsys.readouterr().out.splitlines()[1] == "[1/11] part0: passed before"


def test_a_signal_ends_the_parts_that_run(tmp_path: Path) -> None:
    program = """
        import pathlib, sys
        from benchmarks.gpu import parts as gpu
        code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(300)"
        listed = [gpu.Part(name, [sys.executable, "-c", code, f"{sys.argv[1]}/{name}"], 300, alone=False) for name in ("one", "two")]
        gpu.parts, gpu.machine = (lambda *_: listed), (lambda _: {"host": "", "python": "", "torch": "", "gpus": []})
        sys.argv[1:] = ["--out", sys.argv[1] + "/out", "--device", "cpu"]
        sys.exit(gpu.main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], cwd=REPO)
    try:
        until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in ("one", "two")), "both parts run")
        pids = [int((tmp_path / name).read_text()) for name in ("one", "two")]
        process.terminate()
        assert process.wait(60) == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        process.kill()


def test_a_budget_ends_a_part_and_the_next_call_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "LEAST", 1.0)
    chosen = [
        part_of("long", f"import pathlib, time; time.sleep(30 * (not pathlib.Path({str(tmp_path)!r}, 'go').exists()))"),
        part_of("next", ""),
    ]
    _run_parts(monkeypatch, tmp_path, chosen, "--budget-s", "2")
    assert "long: still running after" in (said := capsys.readouterr().out) and "next: no time left" in said
    (tmp_path / "go").touch()
    assert _run_parts(monkeypatch, tmp_path, chosen) == 0


def test_a_name_that_no_part_has_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no part toy; there are: one"):
        _run_parts(monkeypatch, tmp_path, [part_of("one", "")], "--only", "toy")


# -- packages that are carried ----------------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with a package that this Python has, one that it lacks, and a peer."""
    for name in ("torch", "hf_zero_carried", "peer"):
        (tmp_path / gpu.VERSION / name / name).mkdir(parents=True)
        (tmp_path / gpu.VERSION / name / name / "__init__.py").write_text("WHERE = __file__\n")
    monkeypatch.setattr(gpu, "BUNDLE", tmp_path)
    return tmp_path / gpu.VERSION


def test_only_what_is_missing_is_taken_from_the_bundle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.carried(bundle) == [str(bundle / "hf_zero_carried")]
    monkeypatch.setattr(gpu, "carried", lambda: [str(bundle / "hf_zero_carried")])
    monkeypatch.setenv("PYTHONPATH", "/given/by/the/caller")
    path = gpu.environment()["PYTHONPATH"].split(os.pathsep)
    assert path == [str(REPO), str(bundle / "hf_zero_carried"), "/given/by/the/caller"]
    given = {part.name for part in gpu.parts("cuda", toy=False) if str(bundle / "peer") in part.command}
    assert given == {"peer-builds", "compiled", "wide", "lora", "xl-peers", "step-time"}


def test_what_nobody_has_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "carried", list)
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "hf_zero_carried"))
    with pytest.raises(SystemExit, match=r"lacks hf_zero_carried, and so does .*gpu_bundle\.sh .*carry that folder here"):
        gpu.environment()


SAYS_ITS_PATH = "import json, os; print(json.dumps({'path': os.environ.get('PYTHONPATH')}))"


@pytest.mark.parametrize(("contender", "first"), [("hf_zero", str(REPO)), ("deepspeed", "/peer")])
def test_ranks_see_the_path_they_are_given(contender: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(SAYS_ITS_PATH)
    monkeypatch.setattr(device_processes, "WORKER", worker)
    monkeypatch.setenv("PYTHONPATH", "/carried")
    job = {"contender": contender, "device": "cpu", "peer_path": "/peer"}
    assert device_processes.run(job, sys.executable).answer == {"path": f"{first}{os.pathsep}/carried"}
    assert processes.python_path("/another/python", "/peer") == "/peer"


def test_a_rank_that_fails_ends_the_others_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import os, time\nif os.environ['RANK'] == '1': raise ValueError('a bug')\ntime.sleep(100)\n")
    monkeypatch.setattr(device_processes, "WORKER", worker)
    monkeypatch.setattr(device_processes, "SECONDS_AFTER_FAILURE", 0.5)
    job = {"contender": "hf_zero", "device": "cpu", "world": 2, "limit": 60}
    assert device_processes.run(job, sys.executable).reason == "does not run: ValueError: a bug"


def test_make_takes_the_python_it_is_given() -> None:
    """No venv is made for it, and nothing installed."""
    listed = run(["make", "gpu", f"GPU_PYTHON={sys.executable}", "GPU_ARGS=--list"], cwd=REPO)
    assert f"facts            90 s  {sys.executable} -m benchmarks.gpu.facts" in listed


# -- nothing but what the machine has ---------------------------------------------------------------------------------------

# On the machine, or in what benchmarks/gpu/gpu_bundle.sh carries.
THERE = {
    "torch", "transformers", "accelerate", "triton", "lightning", "peft", "pytest", "safetensors", "rich", "tqdm", "psutil", "numpy",
    "packaging", "pydantic", "hypothesis", "deepspeed", "_hf_zero_startup",
}  # fmt: skip
OWN = ("benchmarks", "tests", "hf_zero", "offline")  # offline: of the examples, beside their scripts


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file_of(module: str) -> Path | None:
    path = REPO.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def test_no_part_needs_a_package_that_the_machine_lacks() -> None:
    """All that the parts' own files import, also inside functions; the package's own imports are its dependencies or optional."""
    commands = [word for part in gpu.parts("cuda", toy=False) for word in part.command]
    start = [word for word in commands if word.startswith(("benchmarks.", "tests."))]
    start += [word.split("::")[0].removesuffix(".py").replace("/", ".") for word in commands if word.startswith("tests/")]
    assert {"benchmarks.gpu.facts", "tests.support.gpu", "tests.lightning.test_lightning"} <= set(start)
    assert "benchmarks.steps.mingpt_lightning" in start
    waiting = [*start, "benchmarks.gpu.parts", "benchmarks.common.device_worker", "tests.conftest"]
    seen, foreign = set[str](), dict[str, str]()
    while waiting:
        module = waiting.pop()
        file = _file_of(module)
        if module in seen or file is None or module.startswith("hf_zero"):
            continue
        seen.add(module)
        for name in _imports(file):
            top = name.split(".")[0]
            if top in OWN:
                waiting.append(name)
            elif top not in sys.stdlib_module_names and top not in THERE:
                foreign[top] = module
    assert {"tests.support.deep_skips", "tests.support.recomputation", "tests.support.background_saves"} <= seen
    assert set(foreign) <= {"matplotlib", "torchao", "liger_kernel"}  # on request, the last two in the bundle


# -- numbers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla V100-SXM2-16GB", 0), ("NVIDIA A1000", 0), ("cpu", 0),
    ],
)  # fmt: skip
def test_the_peak_of_a_gpu(device: str, peak: float) -> None:
    assert flops.peak_of(device) == peak * 1e12


def test_flops_are_those_of_the_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by torch in forward and backward; the loss, norms and rotations count nothing."""
    from torch.utils.flop_counter import FlopCounterMode

    size = {"layers": 2, "width": 64, "heads": 4, "vocab": 512, "length": 16, "batch": 2}
    for shape in ("llama", "gpt2"):
        model: nn.Module = build_model(shape, size)
        model.set_attn_implementation("eager")  # type: ignore[operator]
        tokens = torch.zeros(size["batch"], size["length"], dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, labels=tokens).loss.backward()
        expected = flops.per_token(flops.parameters_of(model), size) * tokens.numel()
        assert counter.get_total_flops() == pytest.approx(expected, rel=0.03), shape


def test_a_row_of_step_times() -> None:
    answer = {"seconds": 0.5, "first": 2.0, "gpu": 3 * 2**30, "loss": 10.0}
    row = step_time_gpu.row_of("hf_zero-3", answer, base=0.4, work=2e14, tokens=8192, world=2, peak=1e15)
    assert row == ["hf_zero-3", "0.5000", "1.250", "32768", "40.0 %", "3.00", "2.0", "10.0000"]
    assert step_time_gpu.row_of("DDP", answer, 0.0, 2e14, 8192, 1, 0.0)[2:5] == ["", "16384", ""]


def test_a_contender_trains_only_when_it_is_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, pathlib, sys\n"
        "job = json.loads(sys.argv[1])\n"
        "pathlib.Path(job['folder'], job['contender'] + ' is ready').touch()\n"
        "sys.stdin.readline()\n"
        "pathlib.Path(job['folder'], job['contender'] + ' trains').touch()\n"
        "print(json.dumps({'others': sorted(path.name for path in pathlib.Path(job['folder']).iterdir())}))\n"
    )
    monkeypatch.setattr(device_processes, "WORKER", worker)
    folder = tmp_path / "met"
    folder.mkdir()
    jobs = [({"contender": name, "device": "cpu", "folder": str(folder), "limit": 60}, sys.executable) for name in ("one", "two")]
    one, two = (outcome.answer["others"] for outcome in device_processes.run_all(jobs))
    assert "two trains" not in one and {"one trains", "two trains"} <= set(two)


def test_a_row_that_the_table_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["step_time_gpu", "--table", "lora", "--contenders", "FSDP2"])
    with pytest.raises(SystemExit):
        step_time_gpu.parse()
    assert "table lora has no row FSDP2; it has DDP; hf_zero-3" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "contenders"), [("eager", ("DDP", "hf_zero-3", "FSDP2")), ("lora", ("DDP", "hf_zero-3", "hf_zero-3, compiled"))]
)
def test_contenders_train_alike_at_toy_size(tmp_path: Path, table: str, contenders: tuple[str, ...]) -> None:
    result = tmp_path / "result.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.steps.step_time_gpu",
        "--device",
        "cpu",
        "--toy",
        "--steps",
        "2",
        "--together",
        "2",
        "--warmup",
        "1",
    ]
    command += ["--table", table, "--backend", "aot_eager", "--contenders", *contenders, "--json", str(result)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(result.read_text())["rows"]
    assert [row[0] for row in rows] == list(contenders) and rows[0][2] == "1.000"
    assert all(float(row[-1]) == pytest.approx(float(rows[0][-1]), abs=1e-2) for row in rows)
    losses = [float(row[-1]) for row in rows]
    assert max(losses) - min(losses) < 0.02 * losses[0]
