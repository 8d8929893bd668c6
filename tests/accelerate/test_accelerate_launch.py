"""Unmodified scripts under stock launchers: DeepSpeed users', plain Accelerate's, and what the off switch does."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import yaml

from tests.support.processes import environment, run, run_python

DEEPSPEED_SCRIPT = """
import argparse, json
import torch
import deepspeed
import deepspeed.comm as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
engine, optimizer, loader, scheduler = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=data
)
assert isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(engine, torch.nn.Module)
losses = []
for _ in range(4):
    for inputs, target in loader:
        loss = torch.nn.functional.mse_loss(engine(inputs.to(engine.device)), target.to(engine.device))
        engine.backward(loss)
        engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item() / dist.get_world_size())
norm = deepspeed.utils.safe_get_full_fp32_param(engine.module[0].weight).norm()
if dist.get_rank() == 0:
    print("REPORT " + json.dumps({"losses": losses, "world": dist.get_world_size(), "batches": len(loader), "norm": float(norm)}))
dist.barrier()
dist.destroy_process_group()
"""

DATA_SCRIPT = """
import json, torch
from accelerate import Accelerator
accelerator = Accelerator()
loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(10), batch_size=2, num_workers=1))
seen = accelerator.gather_for_metrics(torch.cat(list(loader)).to(accelerator.device))
mine = [accelerator.process_index, accelerator.num_processes, accelerator.is_main_process, accelerator.state.backend]
with accelerator.main_process_first():
    accelerator.print("REPORT " + json.dumps({"seen": sorted(set(seen.tolist())), "main": mine, "device": accelerator.device.type}))
accelerator.end_training()
"""


def _report(out: str) -> dict[str, Any]:
    (line,) = [line for line in out.splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))


def _launcher_yaml(folder: Path) -> Path:
    settings = {"distributed_type": "DEEPSPEED", "num_processes": 2, "use_cpu": False, "deepspeed_config": {"zero_stage": 2}}
    path = folder / "launcher.yaml"
    path.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "num_machines": 1, **settings}))
    return path


def test_a_deepspeed_users_script_runs_unchanged_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEEPSPEED_SCRIPT)
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    command = ["torchrun", "--standalone", "--nproc_per_node", "2", "train.py", "--deepspeed", "--deepspeed_config", "ds.json"]
    report = _report(run(command, cwd=tmp_path, timeout=200))
    assert report["world"] == 2 and report["batches"] == 4  # 64 rows, 8 per rank and micro-step, 2 ranks
    assert report["losses"][-1] < 0.8 * report["losses"][0]
    assert report["norm"] > 0


def test_the_same_script_runs_alone_without_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEEPSPEED_SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}))
    report = _report(run(["python", "train.py", "--deepspeed_config", "ds.json"], cwd=tmp_path))
    assert report["world"] == 1 and report["losses"][-1] < report["losses"][0]


def test_a_plain_accelerator_shares_the_data_out_among_real_ranks(tmp_path: Path) -> None:
    """Stock accelerate would let both ranks see everything on a machine without accelerator."""
    (tmp_path / "data.py").write_text(DATA_SCRIPT)
    out = run(["accelerate", "launch", "--config_file", str(_launcher_yaml(tmp_path)), "data.py"], cwd=tmp_path, timeout=200)
    report = _report(out)
    assert report["seen"] == list(range(10))
    assert report["main"][:3] == [0, 2, True]
    if report["device"] == "cpu":
        assert report["main"][3] == "gloo"


def test_a_group_made_by_the_script_counts_as_well(tmp_path: Path) -> None:
    script = 'import torch\nif not torch.cuda.is_available(): torch.distributed.init_process_group("gloo")\n' + DATA_SCRIPT
    (tmp_path / "data.py").write_text(script)
    out = run(["accelerate", "launch", "--config_file", str(_launcher_yaml(tmp_path)), "data.py"], cwd=tmp_path, timeout=200)
    assert _report(out)["main"][:3] == [0, 2, True]


def test_a_program_without_deepspeed_only_meets_a_class(tmp_path: Path) -> None:
    """Unwrapping a model imports `deepspeed` in every accelerate program: no process group, no device, no log line."""
    out = run_python(
        """
        import sys, torch
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(2, 2)
        prepared = accelerator.prepare(model)
        print(accelerator.unwrap_model(prepared) is model, "deepspeed" in sys.modules, torch.distributed.is_initialized())
        """,
        cwd=tmp_path,
    )
    assert out.strip() == "True True False"


def test_switched_off_accelerate_finds_no_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(DATA_SCRIPT)
    command = ["accelerate", "launch", "--config_file", str(_launcher_yaml(tmp_path)), "data.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment({"HF_ZERO": "0"}), capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "DeepSpeed is not installed" in done.stderr


def test_environment_commands_print_a_version(tmp_path: Path) -> None:
    assert "DeepSpeed version: 0.19.6" in run(["transformers", "env"], cwd=tmp_path)


_AGAIN = """
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState

    for stage in (2, 3, 2):
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        model = torch.nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        accelerator.print("trained at stage", stage, "on", accelerator.num_processes)
        accelerator.end_training()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
"""


def test_one_run_after_another_in_the_same_processes(tmp_path: Path) -> None:
    """`end_training` destroys the process group; the next one must not meet the last one's addresses in torchrun's store."""
    (tmp_path / "again.py").write_text(textwrap.dedent(_AGAIN))
    command = ["torchrun", "--standalone", "--nproc_per_node", "2", "again.py"]
    out = run(command, cwd=tmp_path, env={"ACCELERATE_USE_DEEPSPEED": "true"}, timeout=90)
    assert out.count("on 2") == 3
