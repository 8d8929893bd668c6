"""``hf-zero plan --from``: what settings of FSDP become, what has no counterpart, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from hf_zero.cli import main
from hf_zero.config.mesh import claims_of_config, solve
from hf_zero.config.resolve import analyse
from hf_zero.plan.fsdp_keys import page
from tests.support.processes import REPO
from tests.support.versions import PARALLELISM_CONFIG

pytestmark = pytest.mark.quick
REST = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no", "num_machines": 2, "num_processes": 16, "use_cpu": False}
AUTO = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
BOTH = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
FULL: dict[str, Any] = {"stage": 3, "stage3_max_reuse_distance": 0}


def accelerate(fsdp: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {**REST, "distributed_type": "FSDP", "fsdp_config": {f"fsdp_{name}": value for name, value in fsdp.items()}, **top}


def mesh(**sizes: int) -> dict[str, Any]:
    return {"parallelism_config": {f"parallelism_config_{name}": value for name, value in sizes.items()}}


MESHES = ("hsdp", "replicas_alone")  # have a parallelism_config
# Files, and what becomes of them beside the keys of a batch.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp2": (accelerate({"version": 2, "reshard_after_forward": True}), {"zero_optimization": FULL, **BOTH}),
    "fsdp2_text": (accelerate({"version": "2", "reshard_after_forward": "False"}), {"zero_optimization": {"stage": 2}, **BOTH}),
    "fsdp2_default": (accelerate({"version": 2}), {"zero_optimization": FULL, **BOTH}),
    "fsdp1_default": (accelerate({}), {"zero_optimization": FULL, **BOTH}),
    "fsdp1_number": (accelerate({"sharding_strategy": 2}), {"zero_optimization": {"stage": 2}, **BOTH}),
    "fsdp1_none": (accelerate({"sharding_strategy": "no_shard"}), {"zero_optimization": {"stage": 0}, **BOTH}),
    "fsdp1_hybrid": (accelerate({"sharding_strategy": "HYBRID_SHARD"}), {"zero_optimization": {**FULL, "mics_shard_size": 8}, **BOTH}),
    "fsdp1_one_node": (
        accelerate({"reshard_after_forward": "HYBRID_SHARD_ZERO2"}, num_machines=1),
        {"zero_optimization": {"stage": 2}, **BOTH},
    ),
    "fsdp2_ignores_strategy": (accelerate({"version": 2, "sharding_strategy": "NO_SHARD"}), {"zero_optimization": FULL, **BOTH}),
    "offload": (accelerate({"version": 2, "offload_params": True}), {"zero_optimization": {**FULL, **HOST}, **BOTH}),
    "offload_whole": (
        accelerate({"version": 2, "offload_params": True, "reshard_after_forward": False, "state_dict_type": "FULL_STATE_DICT"}),
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, **BOTH},
    ),
    "bf16": (accelerate({"version": 2}, mixed_precision="bf16"), {"zero_optimization": FULL, "bf16": {"enabled": True}}),
    "fp8": (accelerate({"version": 2}, mixed_precision="fp8"), {"zero_optimization": FULL, "bf16": {"enabled": True}}),
    "save": (
        accelerate({"version": 2, "state_dict_type": "FULL_STATE_DICT"}),
        {"zero_optimization": {**FULL, "stage3_gather_16bit_weights_on_model_save": True}, **BOTH},
    ),
    "hsdp": (
        accelerate({"version": 2}, **mesh(dp_replicate_size=2, dp_shard_size=4, tp_size=2)),
        {"zero_optimization": {**FULL, "mics_shard_size": 4}, "tensor_parallel": {"autotp_size": 2}, **BOTH},
    ),
    "replicas_alone": (accelerate({"version": 2}, **mesh(dp_replicate_size=16)), {"zero_optimization": {"stage": 0}, **BOTH}),
    "words": (
        {"fsdp": "shard_grad_op auto_wrap offload", "fsdp_config": {"version": 2, "xla": False}, "bf16": True, "learning_rate": 1e-4},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}},
    ),
    "config_wins": (
        {"fsdp": ["shard_grad_op", "offload"], "fsdp_config": {"reshard_after_forward": True, "cpu_offload": False}},
        {"zero_optimization": FULL, **BOTH},
    ),
    "alone": ({"reshard_after_forward": False, "min_num_params": 0}, {"zero_optimization": {"stage": 2}, **BOTH}),
    "distributed": (
        {"fsdp_size": 4, "dp_replicate_size": 2, "tp_size": 2, "fsdp_mixed_precision": True, "ep_plan": None},
        {
            "zero_optimization": {**FULL, "mics_shard_size": 4},
            "tensor_parallel": {"autotp_size": 2},
            "bf16": {"enabled": True},
            "communication_data_type": "fp32",
        },
    ),
    "stages": (
        {"pp_size": 2, "fsdp_size": 4, "tp_size": 2},
        {"zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}, **BOTH},
    ),
    "experts": (
        {"tp_size": 4, "fsdp_size": 2, "enable_expert_parallel": True},
        {"zero_optimization": FULL, "expert_parallel": {"enabled": True, "autoep_size": 4}, **BOTH},
    ),
    "experts_alone": (
        {"tp_size": 2, "fsdp_size": 2, "ep_size": 4, "tp_plan": {}},
        {"zero_optimization": FULL, "expert_parallel": {"enabled": True, "autoep_size": 4}, **BOTH},
    ),
    "experts_beside_split_layers": (
        {"tp_size": 2, "fsdp_size": 4, "dp_replicate_size": 2, "ep_size": 4, "tp_plan": None},
        {
            "zero_optimization": {**FULL, "mics_shard_size": 4},
            "tensor_parallel": {"autotp_size": 2},
            "expert_parallel": {"enabled": True, "autoep_size": 4},
            **BOTH,
        },
    ),
}


def answered(content: Any, folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    file = folder / "fsdp.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    status = main(["plan", "--from", str(file), *flags])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.mark.parametrize("name", [pytest.param(name, marks=[PARALLELISM_CONFIG] if name in MESHES else []) for name in FILES])
def test_the_configuration_of_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, wanted = FILES[name]
    status, printed, _ = answered(content, tmp_path, capsys, "--json")
    config = json.loads(printed)["config"]
    assert status == 0
    assert config == {**AUTO, **wanted}
    problems = analyse(config, world_size=16).problems
    assert not problems.found, problems.report()
    assert not problems.warnings
    assert solve(claims_of_config(config), 16).ranks == 16


@PARALLELISM_CONFIG
def test_json_and_yaml_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, _ = FILES["hsdp"]
    found = [json.loads(answered(text, tmp_path, capsys, "--json")[1])["config"] for text in (json.dumps(content), yaml.safe_dump(content))]
    assert found[0] == found[1]


def test_trainers_file_is_found_beside_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "more.json").write_text('{"reshard_after_forward": false}')
    _, printed, _ = answered({"fsdp": True, "fsdp_config": "more.json"}, tmp_path, capsys, "--json")
    assert json.loads(printed)["config"]["zero_optimization"] == {"stage": 2}


@PARALLELISM_CONFIG
def test_what_has_no_counterpart_is_named_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"version": 2, "ignored_modules": "head", "activation_checkpointing": True, "forward_prefetch": False}
    content = accelerate(settings, **mesh(cp_size=2, dp_shard_size=8))
    _, printed, _ = answered(content, tmp_path, capsys, "--json")
    keys = {row["key"].rpartition(".")[2]: row for row in json.loads(printed)["keys"]}
    missing = {name for name, row in keys.items() if row["fate"] == "none"}
    assert missing == {"fsdp_ignored_modules"}
    assert json.loads(printed)["config"]["hf_zero"] == {"context_parallel_size": 2}
    assert keys["fsdp_activation_checkpointing"]["fate"] == "script"
    assert keys["fsdp_forward_prefetch"]["why"] == "FSDP2 does not read it"
    status, text, _ = answered(content, tmp_path, capsys)
    assert status == 0
    assert "no counterpart: fsdp_config.fsdp_ignored_modules" in text
    assert '"stage": 3' in text


def test_what_is_written_is_what_accelerate_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {**accelerate({"version": 2, "reshard_after_forward": True}, mixed_precision="bf16"), "main_process_port": 1234}
    status, printed, _ = answered(content, tmp_path, capsys, "--write", str(tmp_path / "out"))
    assert status == 0
    assert f"written: {tmp_path / 'out' / 'ds.json'}" in printed
    launcher: Any = load_config_from_file(str(tmp_path / "out" / "accelerate.yaml"))
    assert (launcher.distributed_type.value, launcher.num_processes, launcher.num_machines) == ("DEEPSPEED", 16, 2)
    assert launcher.main_process_port == 1234
    assert launcher.mixed_precision is None  # accelerate refuses it beside a file
    assert launcher.deepspeed_config["zero3_init_flag"] is True
    assert json.loads(Path(launcher.deepspeed_config["deepspeed_config_file"]).read_text())["bf16"] == {"enabled": True}
    status, _, error = answered(content, tmp_path, capsys, "--write", str(tmp_path / "out"))
    assert status == 2
    assert "exists already" in error


def test_the_launcher_needs_a_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answered({"fsdp": True}, tmp_path, capsys, "--write", str(tmp_path / "one"))
    answered({"fsdp": True}, tmp_path, capsys, "--write", str(tmp_path / "two"), "--ranks", "4")
    assert [sorted(file.name for file in (tmp_path / name).iterdir()) for name in ("one", "two")] == [
        ["ds.json"],
        ["accelerate.yaml", "ds.json"],
    ]
    assert yaml.safe_load((tmp_path / "two" / "accelerate.yaml").read_text())["num_processes"] == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            accelerate({"reshard_after_foward": True}),
            ["reshard_after_foward is unknown", "did you mean fsdp_reshard_after_forward"],
        ),
        (accelerate({"version": 3, "offload_params": "maybe"}), ["fsdp_version is 3; one of 1, 2", 'offload_params is "maybe"']),
        (accelerate({"version": 2, "reshard_after_forward": "FULL_SHARD"}), ["a strategy of FSDP1", "true or false"]),
        (accelerate({"sharding_strategy": "HALF"}), ['"HALF"', "one of FULL_SHARD"]),
        (accelerate({"cpu_offload": True, "offload_params": True}), ["two names of one key"]),
        (accelerate({}, num_procesess=2), ["num_procesess is unknown; did you mean num_processes"]),
        (accelerate({}, num_processes="two"), ['num_processes is "two"']),
        (accelerate({}, mixed_precision="int8"), ['mixed_precision is "int8"', "bf16"]),
        (accelerate({"version": 2}, **mesh(dp_shard_size=3)), ["makes 3 ranks", "num_processes is 16"]),
        (accelerate({"sharding_strategy": "HYBRID_SHARD"}, num_processes=15), ["num_machines 2 does not divide"]),
        ({**REST, "distributed_type": "DEEPSPEED"}, ['distributed_type is "DEEPSPEED"', "--config"]),
        ({**REST, "distributed_type": "MULTI_GPU"}, ['distributed_type is "MULTI_GPU"', "FSDP is allowed"]),
        ({"zero_optimization": {"stage": 3}}, ["DeepSpeed configuration already", "--config"]),
        ({"model_type": "llama"}, ["no settings of FSDP", "model_type"]),
        ({"fsdp": "full_shard wrap"}, ['the word "wrap"', "auto_wrap"]),
        ({"fsdp": ""}, ["do not use FSDP"]),
        ({"fsdp": True, "fsdp_confg": {}}, ["fsdp_confg is unknown; did you mean fsdp_config"]),
        ({"fsdp": True, "bf16": True, "fp16": True}, ["both true"]),
        ({"fsdp": "hybrid_shard"}, ["--ranks-per-node"]),
        ({"fsdp": "hybrid_shard", "fsdp_config": {"version": 2}}, ["FSDP1 alone"]),
        ({"fsdp_size": 0}, ["fsdp_size is 0", "from 1 on"]),
        ({"fsdp_size": 2, "tp_sise": 2}, ["tp_sise is unknown; did you mean tp_size"]),
        ("[1, 2]", ["holds a list"]),
        ("", ["holds nothing"]),
        ("fsdp: [", ["neither JSON nor YAML", "line"]),
        ('{"fsdp": }', ["not JSON", "line 1"]),
    ],
)
def test_a_wrong_file_is_status_two_with_one_line(
    content: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed, error = answered(content, tmp_path, capsys)
    assert (status, printed) == (2, "")
    assert len(error.splitlines()) == 1
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--from", "/nowhere.yaml"], "cannot be read"),
        (["--from", "x.yaml", "gpt2"], "leave MODEL, --config and --fit out"),
        (["--from", "x.yaml", "--memory", "80GiB", "--measure"], "does not read --memory, --measure: plan the configuration"),
        (["gpt2"], "--config is missing"),
        (["gpt2", "--config", "{}", "--write", "x"], "--write is a flag of a search: give --fit (or --from FILE) too"),
    ],
)
def test_flags_that_do_not_go_together(words: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert found in capsys.readouterr().err


def test_the_page_has_the_table_of_the_command() -> None:
    text = (REPO / "docs/coming-from-fsdp.md").read_text(encoding="utf-8")
    assert page(text) == text, "run `python -m hf_zero.plan.fsdp_keys --write docs/coming-from-fsdp.md`"
    assert "| `reshard_after_forward: true`" in text
