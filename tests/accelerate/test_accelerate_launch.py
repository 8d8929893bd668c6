"""Unmodified scripts under stock launchers: DeepSpeed users', plain Accelerate's, and what the off switch does."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import TCPStore

from tests.support.launches import launch_on_ranks, report_of, run_on_ranks
from tests.support.processes import Ended, run, run_forked, run_python
from tests.support.rows import slow_but
from tests.support.versions import PARALLELISM_CONFIG

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
# `end_training` destroys the process group; the next one must not meet the last one's addresses in torchrun's store.
AGAIN = """
import os
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState

os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
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


@pytest.mark.parametrize("launcher", slow_but(["torchrun", "torchrun's variables"], "torchrun's variables"))
def test_a_deepspeed_users_script_under_torchrun_and_accelerators_after_it_in_the_same_processes(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEEPSPEED_SCRIPT + AGAIN)
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = ["--deepspeed", "--deepspeed_config", "ds.json"]
    if launcher == "torchrun":
        printed = run(["torchrun", "--standalone", "--nproc_per_node", "2", "train.py", *words], cwd=tmp_path, timeout=200)
    else:
        words[-1] = str(tmp_path / words[-1])
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's, for all groups of its ranks
        agent = {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "GROUP_WORLD_SIZE": 1}
        printed = run_on_ranks(tmp_path / "train.py", *words, **{name: str(value) for name, value in agent.items()})
    report = report_of(printed)
    assert report["world"] == 2 and report["batches"] == 4  # 64 rows, 8 per rank and micro-step, 2 ranks
    assert report["losses"][-1] < 0.8 * report["losses"][0]
    assert report["norm"] > 0
    assert printed.count("on 2") == 3


# -- without a launcher ----------------------------------------------------------------------------------------------------

ALONE = f"""
import json, os, sys
config = {{"train_batch_size": 16, "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-2}}}}}}
os.chdir(sys.argv[1])
json.dump(config, open("ds.json", "w"))
sys.argv[1:] = ["--deepspeed_config", "ds.json"]
{DEEPSPEED_SCRIPT}
"""
WITHOUT_DEEPSPEED = """
import sys, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 2)
prepared = accelerator.prepare(model)
print(accelerator.unwrap_model(prepared) is model, "deepspeed" in sys.modules, torch.distributed.is_initialized())
"""
TOLD_TO_USE_THE_CPU = """
from accelerate import Accelerator, DeepSpeedPlugin
for told in ({}, {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)}):
    print(Accelerator(cpu=True, **told).distributed_type.value, flush=True)
"""
ENVIRONMENT = """
import importlib.metadata, sys
(command,) = importlib.metadata.entry_points(group="console_scripts", name="transformers")
sys.argv = ["transformers", "env"]
command.load()()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    codes = {"script": ALONE, "without deepspeed": WITHOUT_DEEPSPEED, "transformers env": ENVIRONMENT, "cpu": TOLD_TO_USE_THE_CPU}
    return run_forked(codes, tmp_path_factory.mktemp("alone"), "import torch._dynamo, accelerate, transformers.modeling_utils")


def test_the_same_script_runs_alone(alone: dict[str, Ended]) -> None:
    report = report_of(alone["script"].out)
    assert report["world"] == 1 and report["losses"][-1] < report["losses"][0]


def test_a_program_without_deepspeed_only_meets_a_class(alone: dict[str, Ended]) -> None:
    """Unwrapping a model imports `deepspeed` in every accelerate program: no process group, no device, no log line."""
    assert alone["without deepspeed"].out.strip() == "True True False", alone["without deepspeed"]


def test_a_plugin_that_accelerate_leaves_out_is_told(alone: dict[str, Ended]) -> None:
    assert alone["cpu"].out.split() == ["NO", "NO"]
    assert alone["cpu"].err.count("accelerate ignores the DeepSpeed plugin") == 1, alone["cpu"]


def test_environment_commands_print_a_version(alone: dict[str, Ended]) -> None:
    assert "DeepSpeed version: 0.19.6" in alone["transformers env"].out, alone["transformers env"]


# -- accelerate launch -------------------------------------------------------------------------------------------------------

DATA_SCRIPT = """
import json, torch
from accelerate import Accelerator
accelerator = Accelerator()
loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(10), batch_size=2))
seen = accelerator.gather_for_metrics(torch.cat(list(loader)).to(accelerator.device))
mine = [accelerator.process_index, accelerator.num_processes, accelerator.is_main_process]
accelerator.print("REPORT " + json.dumps({"seen": sorted(set(seen.tolist())), "main": mine, "own": len(torch.cat(list(loader)))}))
accelerator.end_training()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    """The launcher's file, beside the script."""
    (tmp_path / "data.py").write_text(textwrap.dedent(DATA_SCRIPT))
    settings: dict[str, Any] = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "use_cpu": False,
        "deepspeed_config": {"zero_stage": 2},
    }
    path = tmp_path / "launcher.yaml"
    path.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "num_machines": 1, **settings}))
    return path


@pytest.mark.parametrize("group", [False, True], ids=["by accelerate", "by the script"])
def test_data_is_shared_out_whoever_made_the_group(group: bool, launcher: Path) -> None:
    report = report_of(launch_on_ranks(launcher, launcher.with_name("data.py"), group=group))
    assert report == {"seen": list(range(10)), "main": [0, 2, True], "own": 6}


def test_switched_off_nothing_is_wrapped_and_accelerate_finds_no_deepspeed(launcher: Path) -> None:
    code = f"""
        import sys, accelerate
        from accelerate.commands.launch import launch_command, launch_command_parser
        assert not any(name.startswith("hf_zero.integrations") for name in sys.modules)
        print(accelerate.Accelerator.gather.__dict__)
        try:
            launch_command(launch_command_parser().parse_args(["--config_file", {str(launcher)!r}, "data.py"]))
        except ImportError as error:
            print(error)
    """
    wrapped, told = run_python(code, env={"HF_ZERO": "0"}).splitlines()[-2:]
    assert wrapped == "{}" and "DeepSpeed is not installed" in told


MESH_SCRIPT = """
import json
from accelerate import Accelerator
accelerator = Accelerator()
mesh = accelerator.torch_device_mesh
sizes = dict(zip(mesh.mesh_dim_names, mesh.shape))
together = accelerator.deepspeed_plugin.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 1)
accelerator.print("REPORT " + json.dumps({"sizes": sizes, "tp": accelerator.parallelism_config.tp_size, "together": together}))
accelerator.end_training()
"""


@PARALLELISM_CONFIG
@pytest.mark.parametrize("where", ["flag", "file"])
def test_the_launcher_passes_the_sizes_of_a_parallelism_config_on(where: str, launcher: Path) -> None:
    script = launcher.with_name("mesh.py")
    script.write_text(MESH_SCRIPT)
    if where == "file":
        launcher.write_text(launcher.read_text() + yaml.safe_dump({"parallelism_config": {"parallelism_config_tp_size": 2}}))
    flags = ["--use_deepspeed", "--parallelism_config_tp_size", "2"] if where == "flag" else []
    assert report_of(launch_on_ranks(launcher, script, flags=flags)) == {"sizes": {"tp": 2}, "tp": 2, "together": 2}
