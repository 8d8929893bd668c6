"""No secret on a command line: every launcher is started for real, with programs that write down what they were given."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPO, run

SECRETS = {
    "HF_TOKEN": "hf_S3CRETtoken",
    "WANDB_API_KEY": "wandbS3CRETkey",  # pragma: allowlist secret
    "HF_HUB_PASSWORD": "S3CRET pass,word",  # pragma: allowlist secret
    "NCCL_CREDENTIALS": "S3CRETcredentials",
    "AWS_SECRET_ACCESS_KEY": "S3CRETaws",  # pragma: allowlist secret
    "ACCELERATE_auth": "S3CRETauth",
}
IN_FILE = {"FILE_TOKEN": "S3CRETfile", "PLAIN": "an,ordinary value", "MASTER_PORT": "1"}
PROGRAMS = ("mpirun.openmpi", "mpirun.mpich", "srun")
RECORDER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["RECORD"], "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
"""
LAUNCHERS = {
    "openmpi": ["--launcher", "openmpi"],
    "mpich": ["--launcher", "mpich"],
    "mvapich": ["--launcher", "mvapich"],
    "slurm": ["--launcher", "slurm"],
    "slurm without hostfile": ["--launcher", "slurm", "--num_nodes", "2"],
    "standard": ["--launcher", "standard", "--node_rank", "1"],
    "pdsh": ["--launcher", "pdsh", "--include", "worker-1"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working folder, with programs, a hostfile and a file of variables."""
    for name in PROGRAMS:
        program = tmp_path / name
        program.write_text(RECORDER)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "hosts").write_text("worker-1 slots=2\nworker-2 slots=2\n")
    (tmp_path / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in IN_FILE.items()))
    # What torchrun would be: `python -m torch.distributed.run` finds this one first.
    module = tmp_path / "torch" / "distributed"
    module.mkdir(parents=True)
    for package in (module.parent, module):
        (package / "__init__.py").touch()
    (module / "run.py").write_text(RECORDER)
    return tmp_path


def start(folder: Path, *words: str) -> str:
    """Runs `hf-zero launch`; returns what it printed."""
    path = os.pathsep.join((str(folder), os.environ["PATH"]))
    env = {**SECRETS, "RECORD": str(folder / "record.json"), "HOME": str(folder), "PATH": path}
    env["PYTHONPATH"] = os.pathsep.join((str(folder), str(REPO)))
    return run([sys.executable, "-m", "hf_zero", "launch", *words, "train.py", "--lr", "1"], cwd=folder, env=env)


def hosts(launcher: str) -> list[str]:
    return [] if "without" in launcher else ["--hostfile", "hosts"]


@pytest.mark.fast_rows("openmpi", "slurm", "standard", "pdsh")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_secrets_travel_in_the_environment_only(launcher: str, folder: Path) -> None:
    start(folder, *LAUNCHERS[launcher], *hosts(launcher))
    words, environ = json.loads((folder / "record.json").read_text())
    line = "\0".join(words)
    for name, value in {**SECRETS, **IN_FILE}.items():
        if name != "MASTER_PORT":
            assert value not in line, f"the value of {name} is in the command line"
    assert "S3CRET" not in line
    assert {name: environ[name] for name in SECRETS} == SECRETS
    if launcher not in ("standard", "pdsh"):  # these start ranks on this host alone
        assert (environ["FILE_TOKEN"], environ["PLAIN"]) == (IN_FILE["FILE_TOKEN"], IN_FILE["PLAIN"])
    assert words[-3:] == ["train.py", "--lr", "1"]


@pytest.mark.fast_rows("mpich", "slurm without hostfile", "pdsh")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_dry_run_prints_names_only(launcher: str, folder: Path) -> None:
    said = start(folder, *LAUNCHERS[launcher], *hosts(launcher), "--dry-run")
    assert "S3CRET" not in said and IN_FILE["PLAIN"] not in said
    assert not (folder / "record.json").exists()
    if launcher not in ("standard", "pdsh"):
        assert "FILE_TOKEN, PLAIN" in said


def test_open_mpi_is_told_every_name(folder: Path) -> None:
    start(folder, *LAUNCHERS["openmpi"], "--hostfile", "hosts", "--include", "worker-1:0,1@worker-2:0,1")
    words, environ = json.loads((folder / "record.json").read_text())
    told = {words[number + 1] for number, word in enumerate(words) if word == "-x"}
    assert {"HF_TOKEN", "WANDB_API_KEY", *IN_FILE, "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"} <= told
    assert "AWS_SECRET_ACCESS_KEY" not in told
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"], environ["CUDA_VISIBLE_DEVICES"]) == ("worker-1", "29500", "0,1")


def test_commas_reach_ranks_of_slurm(folder: Path) -> None:
    """``--export=CUDA_VISIBLE_DEVICES=0,1`` would arrive as ``0``, and ``1`` as a name."""
    start(folder, *LAUNCHERS["slurm"], "--hostfile", "hosts", "--include", "worker-1:0,1@worker-2:0,1", "--master_port", "7")
    words, environ = json.loads((folder / "record.json").read_text())
    assert [word for word in words if word.startswith("--export")] == ["--export=ALL"]
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["MASTER_PORT"]) == ("0,1", "7")


@pytest.mark.parametrize("line", ["S3CRET", "export S3CRET=1", "=S3CRET", "S3CRET-a=1", "S3CRET=a\0b", "--hostfile=S3CRET"])
def test_a_broken_file_of_variables_is_named_and_not_shown(line: str, folder: Path) -> None:
    (folder / ".deepspeed_env").write_text(f"# names\nA=1\n{line}\n")
    with pytest.raises(AssertionError) as error:
        start(folder, *LAUNCHERS["openmpi"], "--hostfile", "hosts")
    text = str(error.value)
    assert ".deepspeed_env:3: the line is not a variable; expected NAME=VALUE" in text
    assert "S3CRET" not in text and "Traceback" not in text
    (folder / ".deepspeed_env").write_bytes(b"\xff")
    with pytest.raises(AssertionError, match="file of variables '.*.deepspeed_env' is not UTF-8"):
        start(folder, *LAUNCHERS["openmpi"], "--hostfile", "hosts")
