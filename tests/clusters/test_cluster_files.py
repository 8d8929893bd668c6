"""The files of examples/clusters: scripts parse, manifests fit their published models, and all name flags and files that exist."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_zero.launch import command, flags
from tests.support.examples import EXAMPLES
from tests.support.processes import REPO

FOLDER = EXAMPLES / "clusters"
JOBS = sorted((FOLDER / "slurm").glob("*.sbatch"))
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))
SCRIPTS = sorted(FOLDER.rglob("*.py"))
# Flags of sbatch that the scripts use (Slurm 22.05 and newer).
SBATCH = {"job-name", "nodes", "gpus-per-node", "ntasks-per-node", "cpus-per-task", "time", "signal", "requeue", "open-mode"}
SBATCH |= {"output", "array"}


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a file of YAML."""
    return list(yaml.safe_load_all(path.read_text()))


def inside(value: Any, name: str) -> list[Any]:
    """Return the values of every field ``name``, at any depth."""
    if isinstance(value, list):
        return [found for inner in value for found in inside(inner, name)]
    if not isinstance(value, dict):
        return []
    return [found for key, inner in value.items() for found in ([inner] if key == name else inside(inner, name))]


def trainer_flags(words: list[str]) -> Any:
    """Return the arguments of trainer.py; its parser ends the process if it does not know a word."""
    from transformers import HfArgumentParser

    from hf_zero import ZeroTrainingArguments

    (found,) = HfArgumentParser(ZeroTrainingArguments).parse_args_into_dataclasses(words)
    return found


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_a_job_script_parses_and_names_flags_of_sbatch(job: Path) -> None:
    text = job.read_text()
    subprocess.run(["bash", "-n", str(job)], check=True)
    directives = [re.split(r"\s+#", line)[0].split()[1:] for line in text.splitlines() if line.startswith("#SBATCH ")]
    names = [word.lstrip("-").partition("=")[0] for words in directives for word in words]
    assert set(names) <= SBATCH and len(names) == len(set(names))
    assert {"requeue", "signal", "open-mode", "output"} <= set(names)
    body = text.rindex("#SBATCH ")
    assert text.index("\nMOST_RESTARTS=") > body, "Slurm reads no directive after the first command"
    for name in re.findall(r"examples/clusters/[\w/.]+", text):
        assert (REPO / name).is_file(), name
    assert f"sbatch examples/clusters/slurm/{job.name}" in text


def test_the_job_script_of_hf_zero_launch_becomes_srun() -> None:
    text = (FOLDER / "slurm" / "launch.sbatch").read_text()
    (line,) = re.findall(r"^hf-zero launch (?:.*\\\n)*.*$", text, re.M)
    values = {"SLURM_NNODES": "3", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_NAME": "launch"}
    for name, value in values.items():
        line = line.replace(f"${name}", value)
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    options = parser.parse_args(shlex.split(line.replace("\\\n", " ").replace('"$@"', ""))[2:])
    words = command.build_command(options, {}).words
    assert words[:7] == ["srun", "--nodes", "3", "--ntasks-per-node", "4", "--export=ALL", "--cpus-per-task=8"]
    assert words[words.index("--output_dir") + 1] == "runs/clusters/launch"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_a_training_script_is_one_file_with_its_command(script: Path) -> None:
    tree = ast.parse(script.read_text())
    assert f"examples/clusters/{script.relative_to(FOLDER).as_posix()}" in (ast.get_docstring(tree) or "")
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    beside = {path.stem for path in FOLDER.rglob("*.py")}
    assert not {name.split(".")[0] for name in names} & beside and "hf_zero" in names


def test_manifests_agree_on_the_image_and_pass_flags_that_the_script_knows() -> None:
    images = {image for path in MANIFESTS for document in documents(path) for image in inside(document, "image")}
    (image,) = images
    assert image in (FOLDER / "kubernetes" / "Dockerfile").read_text()
    copied = (FOLDER / "kubernetes" / "Dockerfile").read_text()
    for path in MANIFESTS:
        assert f"kubectl apply -f examples/clusters/kubernetes/{path.name}" in path.read_text()
        (started, *_) = [args for document in documents(path) for args in inside(document, "args")]
        assert started[0] == "trainer.py" and "examples/clusters/trainer.py" in copied
        found = trainer_flags(started[1:])
        assert found.checkpoint_url.startswith("s3://") and found.max_steps == 1000
        graces = [grace for document in documents(path) for grace in inside(document, "terminationGracePeriodSeconds")]
        times = [entry for document in documents(path) for entries in inside(document, "env") for entry in entries]
        waits = [int(entry["value"]) for entry in times if entry["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
        assert waits and graces and max(waits) < min(graces)


def test_the_numbers_of_nodes_and_gpus_of_a_manifest_agree() -> None:
    (jobset,) = documents(FOLDER / "kubernetes" / "jobset.yaml")
    variables = {entry["name"]: entry.get("value") for entries in inside(jobset, "env") for entry in entries}
    (completions,), (limits,) = inside(jobset, "completions"), inside(jobset, "limits")
    assert inside(jobset, "parallelism") == [completions] == [int(str(variables["PET_NNODES"]))]
    assert limits["nvidia.com/gpu"] == int(str(variables["PET_NPROC_PER_NODE"]))
    job, (replicated,) = jobset["metadata"]["name"], inside(jobset, "replicatedJobs")
    assert variables["PET_MASTER_ADDR"] == f"{job}-{replicated[0]['name']}-0-0.{job}"
    runtime, train = documents(FOLDER / "kubernetes" / "trainjob.yaml")
    assert runtime["metadata"]["name"] == train["spec"]["runtimeRef"]["name"]
    assert runtime["spec"]["mlPolicy"]["numNodes"] == train["spec"]["trainer"]["numNodes"]
    assert inside(train, "limits")[0]["nvidia.com/gpu"] == train["spec"]["trainer"]["numProcPerNode"]
    (torch_job,) = documents(FOLDER / "kubernetes" / "pytorchjob.yaml")
    assert {found["nvidia.com/gpu"] for found in inside(torch_job, "limits")} == {int(torch_job["spec"]["nprocPerNode"])}


def test_the_dockerfile_installs_the_wheel_and_copies_files_that_exist() -> None:
    lines = re.sub(r"\\\n", " ", (FOLDER / "kubernetes" / "Dockerfile").read_text()).splitlines()
    steps = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    assert {step for step, _ in steps} <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "CMD"} and steps[1] == ["FROM", "${BASE}"]
    sources = [word for step, words in steps if step == "COPY" for word in words.split()[:-1]]
    assert [name for name in sources if not name.startswith("build/image/")] == [
        "examples/clusters/trainer.py", "examples/clusters/accelerate_loop.py"
    ]  # fmt: skip
    assert all((REPO / name).is_file() for name in sources[1:])
    (install,) = [words for step, words in steps if step == "RUN"]
    assert "/tmp/wheels/hf_zero-*.whl" in install and "[stores]" in install


def test_the_task_of_skypilot_starts_the_script_with_flags_that_it_knows() -> None:
    (task,) = documents(FOLDER / "skypilot" / "train.yaml")
    values = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_IPS": "a\nb"}
    said = 'torchrun() { printf "%s\\n" "$@"; }\n' + task["run"].replace("exec torchrun", "torchrun")
    done = subprocess.run(
        ["bash", "-c", said], env={**values, "CHECKPOINT_URL": "s3://bucket/run", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    words = done.stdout.splitlines()
    script = words.index("examples/clusters/trainer.py")
    assert words[words.index("--master_addr") + 1] == "a" and (REPO / words[script]).is_file()
    from torch.distributed.run import get_args_parser

    launcher = get_args_parser().parse_args(words)
    assert (launcher.nnodes, launcher.node_rank, launcher.nproc_per_node) == ("2", 1, "8")
    assert trainer_flags(launcher.training_script_args).checkpoint_url == "s3://bucket/run"


def test_torchrun_reads_the_variables_of_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    (jobset,) = documents(FOLDER / "kubernetes" / "jobset.yaml")
    (entries,), (args,) = inside(jobset, "env"), inside(jobset, "args")
    for entry in entries:
        monkeypatch.setenv(entry["name"], entry.get("value", "1"))
    found = get_args_parser().parse_args(args)
    assert (found.nnodes, found.nproc_per_node, found.node_rank) == ("2", "8", 1)
    assert (found.master_addr, found.master_port) == ("hf-zero-node-0-0.hf-zero", 29500)


# -- models of the engines, where their packages are installed ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_fits_the_published_models(path: Path) -> None:
    pytest.importorskip("kubeflow_trainer_api", reason="pip install kubeflow-trainer-api kubeflow-training")
    pytest.importorskip("kubeflow.training", reason="pip install kubeflow-trainer-api kubeflow-training")
    from tests.clusters.kubernetes_models import problems

    for document in documents(path):
        assert problems(document) == []
        document["spec"]["no_such_field"] = 1
        assert "no such field" in problems(document)[-1] or "no such field" in problems(document)[0]


@pytest.mark.slow
def test_skypilot_accepts_the_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if importlib.util.find_spec("sky") is None:
        pytest.skip("pip install skypilot")
    monkeypatch.setenv("HOME", str(tmp_path))
    code = "import sky, sys, yaml; config = yaml.safe_load(open(sys.argv[1])); task = sky.Task.from_yaml_config(config, "
    code += "env_overrides=[('CHECKPOINT_URL', 's3://bucket/run')]); resources = list(task.resources)[0]; "
    code += "print(task.num_nodes, resources.accelerators, resources.use_spot)"
    path = str(FOLDER / "skypilot" / "train.yaml")
    done = subprocess.run([sys.executable, "-c", code, path], cwd=REPO, capture_output=True, text=True)
    assert done.stdout.split() == ["2", "{'H100':", "8}", "True"], done.stderr
