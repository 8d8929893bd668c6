"""Real mpirun, both kinds: scripts in code, with accelerate and with Trainer become ranks without mpi4py."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.processes import run as start

# A program named plain `mpirun` may be either.
MPIRUN = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"],
    "mpich": ["mpirun.mpich"],
}

CODE = """
import json, torch, torch.distributed as dist, hf_zero
model = torch.nn.Linear(4, 2)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 1}}}
engine = hf_zero.initialize(model=model, config=config)[0]
for step in range(3):
    torch.manual_seed(10 * step + dist.get_rank())
    engine.backward(engine(torch.randn(3, 4)).square().mean())
    engine.step()
print("RESULT", json.dumps([dist.get_rank(), dist.get_world_size(), float(sum(p.double().sum() for p in model.parameters()))]), flush=True)
dist.destroy_process_group()
"""

ACCELERATE = """
import json, torch
from accelerate import Accelerator
import hf_zero
accelerator = Accelerator(deepspeed_plugin=hf_zero.ZeroPlugin(stage=1))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.arange(32.0).view(8, 4), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
total = float(sum(p.double().sum() for p in accelerator.unwrap_model(model).parameters()))
print("RESULT", json.dumps([accelerator.process_index, accelerator.num_processes, total]), flush=True)
accelerator.end_training()
"""

TRAINER = """
import json, torch
from transformers import Trainer, TrainingArguments
from tests.support.models import CASES
model = CASES["gpt2"].build()
rows = [{"input_ids": torch.arange(8) + number, "labels": torch.arange(8) + number} for number in range(8)]
config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 0}, "gradient_clipping": "auto",
          "optimizer": {"type": "OneBitAdam", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto", "freeze_step": 2}}}
arguments = TrainingArguments("out", deepspeed=config, per_device_train_batch_size=1, max_steps=4, report_to=[], save_strategy="no",
                              disable_tqdm=True, use_cpu=False)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
assert trainer.deepspeed.optimizer.compresses
total = float(sum(p.double().sum() for p in model.parameters()))
print("RESULT", json.dumps([arguments.process_index, arguments.world_size, total]), flush=True)
"""


def run(command: list[str], folder: Path) -> list[list[float]]:
    """What the ranks printed, by rank."""
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    out = start(command, cwd=folder, env=as_root, timeout=200)
    # Words of two ranks may come between each other on one line; what is inside brackets comes in one piece.
    return sorted(json.loads(result) for result in re.findall(r"\[\d+, \d+, [-+.\de]+\]", out))


def need(kind: str) -> None:
    if shutil.which(MPIRUN[kind][0]) is None:
        pytest.skip(f"{MPIRUN[kind][0]} is not installed (Debian: {'openmpi-bin' if kind == 'openmpi' else 'mpich'})")


def check(found: list[list[float]], world: int) -> None:
    assert [entry[:2] for entry in found] == [[rank, world] for rank in range(world)]
    assert len({entry[2] for entry in found}) == 1, "the ranks trained apart"


@pytest.mark.parametrize("kind", MPIRUN)
def test_script_in_code(kind: str, tmp_path: Path) -> None:
    need(kind)
    (tmp_path / "train.py").write_text(CODE)
    check(run([*MPIRUN[kind], "-np", "3", sys.executable, "train.py"], tmp_path), 3)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["accelerate", "trainer"])
@pytest.mark.parametrize("kind", MPIRUN)
def test_script_of_a_framework(kind: str, script: str, tmp_path: Path) -> None:
    need(kind)
    (tmp_path / "train.py").write_text({"accelerate": ACCELERATE, "trainer": TRAINER}[script])
    check(run([*MPIRUN[kind], "-np", "2", sys.executable, "train.py"], tmp_path), 2)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "standard"])
def test_hf_zero_launch(launcher: str, tmp_path: Path) -> None:
    if launcher in MPIRUN:
        need(launcher)
    (tmp_path / "train.py").write_text(CODE)
    extra = ["--launcher_args=--oversubscribe"] if launcher == "openmpi" else []
    words = ["launch", "--launcher", launcher, "--num_gpus", "2", "--master_port", "29611", *extra, "train.py"]
    check(run([sys.executable, "-m", "hf_zero.cli", *words], tmp_path), 2)
