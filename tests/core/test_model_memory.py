"""Test stage 3 in fresh processes: each rank's memory while a sharded checkpoint loads and while the complete model is saved."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.processes import REPO, environment

RANKS = 2
MIB = 2**20
# What an allocator, huge pages and two threads add to the arithmetic; a second copy of anything measured here is larger.
SLACK = 28 * MIB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, int]]]:
    """Return a checkpoint in several files; bytes of the model, of its largest tensor and of its largest unit."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("large")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="64MB")
    tiny = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**tiny)).save_pretrained(folder / "tiny")
    sizes = {
        "model": sum(param.nbytes for param in model.parameters()),
        "tensor": max(param.nbytes for param in model.parameters()),
        "unit": sum(param.nbytes for param in model.model.layers[0].parameters()),
    }
    yield folder, sizes


def _measure(model: Path, output: Path) -> list[dict[str, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "tests.core.model_memory",
        "--model",
        str(model),
        "--tiny",
        str(model / "tiny"),
        "--output",
        str(output),
    ]
    ranks = []
    for rank in range(RANKS):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = environment(variables)
        ranks.append(subprocess.Popen(command, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    reports = []
    for process in ranks:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, f"{out}\n{err[-4000:]}"
        (line,) = [line for line in out.splitlines() if line.startswith("REPORT ")]
        reports.append(json.loads(line.removeprefix("REPORT ")))
    return reports


@pytest.mark.slow  # its numbers are those of a machine that does nothing else
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_no_rank_holds_the_model(checkpoint: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, sizes = checkpoint
    assert len(list(folder.glob("*.safetensors"))) > 2
    reports = _measure(folder, tmp_path)
    shard = sizes["model"] // RANKS
    for rank, report in enumerate(reports):
        loaded = report["load"] - report["base"]
        assert loaded <= shard + sizes["tensor"] + SLACK, f"rank {rank}: {loaded / MIB:.0f} MiB while loading, of {sizes}"
        for phase in ("save", "state_dict"):
            more = report[phase] - report["engine"]
            assert more <= sizes["unit"] + SLACK, f"rank {rank}: {more / MIB:.0f} MiB more in {phase}, of {sizes}"
    assert [report["entries"] > 0 for report in reports] == [True, False]
    assert all(report["spilled_files"] == 0 for report in reports), "files of the spilled copies have names"

    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    for source in ("config.json", "generation_config.json"):
        (tmp_path / source).write_text((folder / source).read_text())
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(value, expected[name]), name
