"""Mutated hostfiles, files of variables, host filters and launcher variables: read, or refused by name; soon, and in little memory."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from hf_zero.errors import ConfigError
from hf_zero.launch.command import build_command, read_environment_files
from hf_zero.launch.flags import add_arguments
from hf_zero.launch.hosts import MOST_SLOTS, read_hostfile
from hf_zero.launch.nodes import Job
from hf_zero.launch.placement import find_placement, first_host
from tests.fuzz.bounded import bounded
from tests.fuzz.edits import edited, edits
from tests.fuzz.guard import given_many

HOSTFILES = [
    "worker-1 slots=4\nworker-2 slots=4\n",
    "# two\n10.0.0.1\tslots=8 # a\n\n10.0.0.2 slots=8\r\nnode_3.example slots=1",
    "".join(f"n{number:03} slots=2\n" for number in range(64)),
]
VARIABLES = ["NCCL_DEBUG=INFO\n# a\nHF_TOKEN=S3CRET=x\n", "A=b c\nB=\nC = d, e\n"]
FILTERS = ["worker-1", "worker-1:0,2@worker-2:1", "worker-2@worker-1:3"]
TOKENS = [
    *("slots=", "slots", "=", "#", ":", "@", ",", "-", "--host", "worker-1", "worker-2", "é", "\u00b2", "\u0663", "0", "1", "4", '"', "'"),
    *("99999999999", "-1", "1e3", "$(x)", "[1-3]", "(x9999999999)", "2(x3),", " ", "\t", "\n", "\r", "\0", "\u2028", "\x0b"),
    *("\ud800", "\ufeff", "export ", "worker-1 slots=4\n", "9" * 5000, "a" * 5000, "x slots=1\n" * 2000, ":0" * 2000, "@" * 2000),
]
LAUNCHERS = ["standard", "openmpi", "mpich", "mvapich", "slurm", "ssh", "pdsh"]
PLACEMENTS = [
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    {
        "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "gpu[03-04]",
    },
]  # fmt: skip
_folder = tempfile.TemporaryDirectory(prefix="hf_zero_fuzz_")
_parser = argparse.ArgumentParser()
add_arguments(_parser)

Edits = list[tuple[str, int, int, bytes]]


def check_hostfile(number: int, changes: Edits) -> None:
    data = edited(HOSTFILES[number].encode(), changes)
    path = Path(_folder.name, "hosts")
    path.write_bytes(data)
    with bounded(len(data)):
        try:
            hosts = read_hostfile(str(path))
        except ConfigError as error:
            assert str(path) in str(error) and len(str(error)) < 1000
            return
    assert hosts and len({host.name for host in hosts}) == len(hosts)
    for host in hosts:
        assert host.name[0].isalnum() and host.name.isascii() and not set(host.name) & set(" \t,:@=#'\"$")
        assert host.slots == tuple(range(len(host.slots))) and 1 <= len(host.slots) <= MOST_SLOTS
        assert f"{host.name}".encode() in data and f"{len(host.slots)}".encode() in data


def check_variables(number: int, changes: Edits) -> None:
    data = edited(VARIABLES[number].encode(), changes)
    path = Path(_folder.name, "variables")
    path.write_bytes(data)
    with bounded(len(data)):
        try:
            values = read_environment_files({"DS_ENV_FILE": str(path)})
        except ConfigError as error:
            assert str(path) in str(error) and "S3CRET" not in str(error)
            return
    for name, value in values.items():
        assert name.isidentifier() and name.isascii() and "\0" not in value and "\n" not in value


def check_filter(number: int, changes: Edits, launcher: str, exclude: bool) -> None:
    text = edited(FILTERS[number].encode(), changes).decode("utf-8", "surrogateescape")
    path = Path(_folder.name, "filtered")
    path.write_text(HOSTFILES[0])
    words = ["--hostfile", str(path), "--launcher", launcher, f"--{'exclude' if exclude else 'include'}={text}", "train.py"]
    with bounded(len(text)):
        try:
            command = build_command(_parser.parse_args(words), {"HF_TOKEN": "S3CRET", "DS_ENV_FILE": str(path.with_name("none"))})
        except ConfigError:
            return
    assert "S3CRET" not in repr(command) if isinstance(command, Job) else "S3CRET" not in str(command)
    for part in command.nodes if isinstance(command, Job) else [command]:
        assert all("S3CRET" not in word for word in part.words)
        assert set(part.variables) <= {"MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"}
        devices = part.variables.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        assert devices == [str(device) for device in sorted({int(device) for device in devices})] and int(devices[-1]) < 4


def check_placement(number: int, name: int, changes: Edits) -> None:
    environ = dict(PLACEMENTS[number])
    chosen = sorted(environ)[name % len(environ)]
    environ[chosen] = edited(environ[chosen].encode(), changes).decode("utf-8", "surrogateescape")
    with bounded(len(environ[chosen])):
        try:
            found = find_placement(environ)
        except ConfigError as error:
            assert chosen in str(error)
            return
        first_host(environ[chosen])
    assert found is None or (found.world > 1 and 29500 <= found.port < 31500)


CHANGES = edits(TOKENS)
HOST_CASES: dict[str, Any] = {"number": st.integers(0, len(HOSTFILES) - 1), "changes": CHANGES}
VARIABLE_CASES: dict[str, Any] = {"number": st.integers(0, len(VARIABLES) - 1), "changes": CHANGES}
FILTER_CASES: dict[str, Any] = {
    "number": st.integers(0, len(FILTERS) - 1), "changes": CHANGES, "launcher": st.sampled_from(LAUNCHERS), "exclude": st.booleans(),
}  # fmt: skip
PLACEMENT_CASES: dict[str, Any] = {"number": st.integers(0, len(PLACEMENTS) - 1), "name": st.integers(0, 9), "changes": CHANGES}


@pytest.mark.parametrize("number", range(len(HOSTFILES)))
def test_what_is_mutated_is_valid(number: int) -> None:
    path = Path(_folder.name, "hosts")
    path.write_text(HOSTFILES[number])
    assert len(read_hostfile(str(path))) > 1


test_hostfiles, test_many_hostfiles = given_many(check_hostfile, 250, 4000, **HOST_CASES)
test_files_of_variables, test_many_files_of_variables = given_many(check_variables, 150, 3000, **VARIABLE_CASES)
test_filters, test_many_filters = given_many(check_filter, 150, 3000, **FILTER_CASES)
test_variables_of_launchers, test_many_variables_of_launchers = given_many(check_placement, 100, 3000, **PLACEMENT_CASES)
