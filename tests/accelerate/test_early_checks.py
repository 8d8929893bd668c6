"""A configuration's mistakes are one error where it is first seen: before ranks start or meet, and before a model is built."""

from __future__ import annotations

import json

import pytest

from tests.support.launches import run_warm
from tests.support.processes import Ended
from tests.support.versions import PARALLELISM_CONFIG

GOOD = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}
FILES = {
    "good": GOOD,
    "commented": GOOD,
    "typo": {**GOOD, "gradient_cliping": 1.0, "zero_optimization": {"stage": 2, "overlap_com": True}},
    "both": {
        **GOOD,
        "gradient_cliping": 1.0,
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
    },
    "other": {**GOOD, "train_micro_batch_size_per_gpu": 16},
    "total": {**GOOD, "train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
    "axes": {**GOOD, "hf_zero": {"context_parallel_size": 4}},
    "shared": {**GOOD, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
}
AS_A_RANK = """
import json, os, sys
folder = sys.argv[1]
os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
import torch
from hf_zero.comm import bootstrap
from hf_zero.errors import HfZeroError
from transformers import TrainingArguments
def args(name, **more):
    return TrainingArguments(folder, deepspeed=name, report_to=[], per_device_train_batch_size=4, learning_rate=1e-3, **more)
class Made(Exception):
    pass
def reached(*_, **__):
    raise Made
bootstrap.store_at_address = reached
def outcome(call):
    try:
        call()
    except HfZeroError as error:
        print(f"{type(error).__name__}: {error}")
    except Made:
        print("the ranks meet")
    print(torch.distributed.is_initialized(), flush=True)
def file(name):
    return f"{folder}/../{name}.json"
"""
LAUNCH = """
import sys
folder = sys.argv[1]
from accelerate.commands import launch
launch.deepspeed_launcher = lambda args: print("ranks start")
words = ["--use_deepspeed", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
def start(name, *more):
    parser = launch.launch_command_parser()
    launch.launch_command(parser.parse_args([*words, *more, "--deepspeed_config_file", f"{folder}/../{name}.json", "train.py"]))
def as_program(name):
    import runpy
    sys.argv = ["launch", *words, "--deepspeed_config_file", f"{folder}/../{name}.json", "train.py"]
    runpy.run_module("accelerate.commands.launch", run_name="__main__", alter_sys=True)
"""
# Training arguments look for devices first, which makes the group; plugins only read.
CODES = {
    "arguments-good": AS_A_RANK + "outcome(lambda: args(file('good')))",
    "arguments-commented": AS_A_RANK + "outcome(lambda: args(file('commented')))",
    "arguments-both": AS_A_RANK + "outcome(lambda: args(file('both')))",
    "arguments-dict": AS_A_RANK + "outcome(lambda: args(json.load(open(file('both')))))",
    "arguments-total": AS_A_RANK + "outcome(lambda: args(file('total')))",
    "arguments-axes": AS_A_RANK + "outcome(lambda: args(file('axes')))",
    "arguments-both-axes": AS_A_RANK
    + "from accelerate import ParallelismConfig\nboth = ParallelismConfig(cp_size=2, sp_size=2)\n"
    + "outcome(lambda: args(file('good'), parallelism_config=both))",
    "plugin-axes": AS_A_RANK + "from accelerate import DeepSpeedPlugin\noutcome(lambda: DeepSpeedPlugin(hf_ds_config=file('axes')))",
    "launch-axes": LAUNCH + "start('good', '--parallelism_config_cp_size', '2', '--parallelism_config_sp_size', '2')",
    "arguments-missing": AS_A_RANK + "outcome(lambda: args('nowhere.json'))",
    "arguments-evaluate": AS_A_RANK + "outcome(lambda: args(file('other'), do_eval=True))",
    "arguments-launcher": AS_A_RANK
    + "os.environ.update(ACCELERATE_USE_DEEPSPEED='true', ACCELERATE_DEEPSPEED_CONFIG_FILE=file('both'))\noutcome(lambda: args(None))",
    "plugin-typo": AS_A_RANK + "from accelerate import DeepSpeedPlugin\noutcome(lambda: DeepSpeedPlugin(hf_ds_config=file('typo')))",
    "plugin-missing": AS_A_RANK + "from accelerate import DeepSpeedPlugin\noutcome(lambda: DeepSpeedPlugin(hf_ds_config='nowhere.json'))",
    "plugin-total": AS_A_RANK + "from accelerate import DeepSpeedPlugin\noutcome(lambda: DeepSpeedPlugin(hf_ds_config=file('total')))",
    "plugin-shared": AS_A_RANK + "from accelerate import DeepSpeedPlugin\noutcome(lambda: DeepSpeedPlugin(hf_ds_config=file('shared')))",
    "plugin-zero": AS_A_RANK + "from hf_zero import ZeroPlugin\noutcome(lambda: ZeroPlugin(file('typo')))",
    "reader-missing": AS_A_RANK
    + "from transformers.integrations import HfDeepSpeedConfig\noutcome(lambda: HfDeepSpeedConfig('nowhere.json'))",
    "launch-good": LAUNCH + "start('good')",
    "launch-typo": LAUNCH + "start('typo')",
    "launch-missing": LAUNCH + "start('nowhere')",
    "program-good": LAUNCH + "as_program('good')",
    "program-typo": LAUNCH + "as_program('typo')",
    "program-other": "import runpy\nprint(*sorted(runpy.run_module('accelerate.commands.launch').keys() & {'main', 'it', '__builtins__'}))",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("early")
    for name, config in FILES.items():
        (folder / f"{name}.json").write_text("/* comment */" * (name == "commented") + json.dumps(config))
    imports = "import deepspeed, transformers.training_args, accelerate.commands.launch, hf_zero.integrations.early_checks, hf_zero.zero"
    return run_warm(CODES, folder, imports)


def test_all_findings_at_once_with_those_of_transformers(ended: dict[str, Ended]) -> None:
    for name in ("arguments-both", "arguments-dict", "arguments-launcher"):
        text = ended[name].out
        assert "`gradient_cliping` is unknown; did you mean `gradient_clipping`?" in text, ended[name]
        assert "ds train_micro_batch_size_per_gpu=16 vs per_device_train_batch_size=4" in text
        assert "ds optimizer.params.lr=0.5 vs learning_rate=0.001" in text
        assert len(text.splitlines()) == 7 and text.endswith("\nFalse\n"), text


def test_nothing_is_found_in_what_is_right(ended: dict[str, Ended]) -> None:
    for name in ("arguments-good", "arguments-commented"):
        assert ended[name].out == "the ranks meet\nFalse\n", ended[name]
    assert ended["launch-good"].out == "ranks start\n" and ended["launch-good"].status == 0, ended["launch-good"]


def test_a_total_that_fits_no_number_of_ranks(ended: dict[str, Ended]) -> None:
    """Two ranks may share their samples, by a ParallelismConfig that an Accelerator is given later: then 4 is 4 x 1 x 1."""
    assert "`train_batch_size` does not fit: 7 is not 2" in ended["arguments-total"].out
    assert "vs train_batch_size (calculated)=" in ended["arguments-total"].out
    assert "`train_batch_size` does not fit: 7 is not 2" in ended["plugin-total"].out
    assert ended["plugin-shared"].out == "False\n", ended["plugin-shared"]


@PARALLELISM_CONFIG
def test_sizes_that_no_ranks_fit(ended: dict[str, Ended]) -> None:
    """4 ranks cannot share samples where 2 run: found before data are loaded, and by ``accelerate launch`` before ranks start."""
    text = "4 ranks (pp x cp x sp x tp) are to share their samples; 1 or 2 would fit. It is described by\n"
    for name in ("arguments-axes", "plugin-axes"):
        assert text + "- hf_zero.context_parallel_size: cp 4\nFalse\n" in ended[name].out, ended[name]
    assert text + "- ParallelismConfig.cp_size: cp 2\n- ParallelismConfig.sp_size: sp 2\n" in ended["arguments-both-axes"].out
    launched = ended["launch-axes"]
    assert launched.status == 1 and launched.out == "", launched
    assert text.strip() in launched.err and "- --parallelism_config_cp_size: cp 2" in launched.err, launched


def test_a_missing_file_is_one_error(ended: dict[str, Ended]) -> None:
    for name in ("arguments-missing", "plugin-missing", "reader-missing"):
        assert ended[name].out == (
            "ConfigError: The config 'nowhere.json' is neither an existing file nor JSON or base64 text. Give the path of a JSON file.\n"
            "False\n"
        ), ended[name]


def test_a_plugin_names_its_keys(ended: dict[str, Ended]) -> None:
    for name in ("plugin-typo", "plugin-zero"):
        assert "`zero_optimization.overlap_com` is unknown" in ended[name].out and "`gradient_cliping`" in ended[name].out, ended[name]
        assert ended[name].out.endswith("\nFalse\n")


def test_arguments_for_evaluation_are_not_compared(ended: dict[str, Ended]) -> None:
    """transformers compares them when it trains."""
    assert ended["arguments-evaluate"].out == "the ranks meet\nFalse\n", ended["arguments-evaluate"]


def test_accelerate_launch_starts_no_ranks(ended: dict[str, Ended]) -> None:
    typo, missing = ended["launch-typo"], ended["launch-missing"]
    assert typo.out == missing.out == "" and typo.status == missing.status == 1
    assert typo.err.count("\n") == 4 and "`gradient_cliping`" in typo.err and "`zero_optimization.overlap_com`" in typo.err, typo.err
    assert missing.err.count("\n") == 2 and "is neither an existing file nor" in missing.err, missing.err


def test_accelerate_launch_started_by_python_m_is_the_same(ended: dict[str, Ended]) -> None:
    """`python -m accelerate.commands.launch` runs the module under the name ``__main__``; under other names it is what it was."""
    assert ended["program-good"].out == "ranks start\n" and ended["program-good"].status == 0, ended["program-good"]
    assert ended["program-typo"].status == 1 and "`gradient_cliping`" in ended["program-typo"].err, ended["program-typo"]
    assert ended["program-other"].out == "__builtins__ main\n", ended["program-other"]
