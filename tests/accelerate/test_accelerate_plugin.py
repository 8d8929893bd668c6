"""ZeroPlugin: what its arguments become, how they meet a JSON, and what it leaves to the engine."""

from __future__ import annotations

import base64
import copy
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils
import pytest
import torch

from hf_zero import DummyOptim, DummyScheduler, ZeroPlugin
from hf_zero.errors import ConfigError
from hf_zero.integrations import script_values
from tests.support import ranks, trainers

JSON: dict[str, Any] = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 3, "steps_per_print": 5}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answers of a launcher, whatever started the tests."""
    import os

    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)


def test_is_the_stock_plugin_to_accelerate() -> None:
    plugin = ZeroPlugin(stage=3)
    assert isinstance(plugin, accelerate.utils.DeepSpeedPlugin)
    assert plugin.zero_stage == 3 and plugin.zero3_init_flag is True and plugin.hf_ds_config.is_zero3()
    assert copy.deepcopy(plugin).deepspeed_config == plugin.deepspeed_config


@pytest.mark.parametrize("launched", [False, True])
def test_a_clipping_of_0_in_the_stock_plugin_turns_clipping_off(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import DeepSpeedPlugin

    if launched:
        monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.0")
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=None if launched else 0)
    assert plugin.deepspeed_config["gradient_clipping"] == 0.0, "a missing key clips at 1.0"


def test_typed_arguments_become_the_json() -> None:
    plugin = ZeroPlugin(
        stage=3,
        offload_optimizer="cpu",
        offload_param={"device": "nvme", "nvme_path": "/scratch", "buffer_count": 7},
        tensor_parallel_size=2,
        mixed_precision="bf16",
        gradient_accumulation_steps=4,
        gradient_clipping=0.0,
    )
    config = plugin.deepspeed_config
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "/scratch", "buffer_count": 7}
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert (config["bf16"], config["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.0, "0 must stand in the JSON: DeepSpeed's default clips at 1.0"
    assert plugin.offload_optimizer_device == "cpu" and plugin.hf_ds_config.is_offload()


def test_defaults_are_stage_two_with_auto_batches() -> None:
    config = ZeroPlugin().deepspeed_config
    assert config["zero_optimization"]["stage"] == 2
    assert {config[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")} == {"auto"}
    assert "tensor_parallel" not in ZeroPlugin(tensor_parallel_size=1).deepspeed_config


def test_weights_are_gathered_on_save_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock default makes `get_state_dict` fail at stage 3; an answer of the user's still holds."""

    def gathers() -> bool:
        return ZeroPlugin(stage=3).deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]

    assert gathers() is True
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false")
    assert gathers() is False


@pytest.mark.parametrize(
    "form", [dict, json.dumps, lambda data: base64.urlsafe_b64encode(json.dumps(data).encode()).decode()], ids=["dict", "text", "base64"]
)
def test_json_is_read_in_every_form_and_not_changed(form: Callable[[dict[str, Any]], Any]) -> None:
    given = form(JSON)
    before = copy.deepcopy(given)
    plugin = ZeroPlugin(given)
    assert plugin.zero_stage == 2 and plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 3
    assert given == before


def test_json_path_is_read_and_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 1}, /* sloppy */ "gradient_clipping": "auto",}')
    plugin = ZeroPlugin(path, gradient_clipping=0.3)
    assert plugin.zero_stage == 1 and plugin.deepspeed_config["gradient_clipping"] == 0.3
    assert [entry.name for entry in tmp_path.iterdir()] == ["zero.json"]


def test_users_steps_per_print_survives() -> None:
    """The stock plugin overwrites it with infinity."""
    assert ZeroPlugin(JSON).deepspeed_config["steps_per_print"] == 5
    assert ZeroPlugin({"zero_optimization": {"stage": 2}}).deepspeed_config["steps_per_print"] == float("inf")


def test_accumulation_left_out_of_the_json_is_the_accelerators() -> None:
    """Without hf_zero the stock plugin's 1 would overrule `Accelerator(gradient_accumulation_steps=4)`."""
    for plugin, before in ((ZeroPlugin(JSON), "auto"), (accelerate.utils.DeepSpeedPlugin(hf_ds_config=dict(JSON)), 1)):
        assert plugin.deepspeed_config["gradient_accumulation_steps"] == before
        for _ in range(2):
            plugin.fill_match("gradient_accumulation_steps", must_match=False, gradient_accumulation_steps=4)
            assert plugin.get_value("gradient_accumulation_steps") == 4


def test_all_contradictions_of_a_script_are_one_error() -> None:
    params = {"lr": 5e-5, "weight_decay": 0.01, "betas": [0.9, 0.99]}
    plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config=JSON | {"optimizer": {"type": "AdamW", "params": params}, "train_batch_size": 6})
    given = {"optimizer.params.lr": 1e-5, "optimizer.params.weight_decay": 0.1, "train_batch_size": 4}
    with pytest.raises(ConfigError) as caught:
        plugin.deepspeed_config_process(**given)
    text = str(caught.value)
    assert "optimizer.params.lr is 5e-05 in the configuration, but DummyOptim(lr) is 1e-05\n" in text
    assert "optimizer.params.weight_decay is 0.01 in the configuration, but DummyOptim(weight_decay) is 0.1\n" in text
    assert "train_batch_size=6" in text and text.count("Set one of the two") == 1


def test_arguments_fill_gaps_and_autos_of_the_json() -> None:
    plugin = ZeroPlugin({"zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "true"}}, stage=3, mixed_precision="bf16")
    assert plugin.zero_stage == 3 and plugin.deepspeed_config["fp16"]["enabled"] is False
    assert ZeroPlugin({"zero_optimization": True}, stage=1).zero_stage == 1


def test_contradictions_are_listed_together() -> None:
    with pytest.raises(ConfigError) as caught:
        ZeroPlugin(JSON | {"gradient_clipping": 2.0}, stage=3, gradient_clipping=1.0)
    text = str(caught.value)
    assert "zero_optimization.stage: the configuration says 2, ZeroPlugin was given 3" in text
    assert "gradient_clipping: the configuration says 2.0, ZeroPlugin was given 1.0" in text
    assert 'write "auto"' in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"stage": 4}, r"stage is 4; allowed are 0, 1, 2, 3"),
        ({"stage": True}, r"stage is True; allowed are 0, 1, 2, 3"),
        ({"offload_optimizer": "disk"}, r"offload_optimizer device is 'disk'; allowed are 'none', 'cpu', 'nvme'"),
        ({"offload_param": "nvme"}, r'is "nvme", but no folder is set; give offload_param=\{"device": "nvme"'),
        ({"mixed_precision": "half"}, r"mixed_precision is 'half'; allowed are 'no', 'fp16', 'bf16', 'fp8'"),
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size is 0; a number of at least 1"),
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps is 0; a number of at least 1"),
        ({"gradient_clipping": -1.0}, r"gradient_clipping is -1.0; a number of at least 0"),
        ({"offload_optimizer": True}, r"offload_optimizer is True; allowed are 'none', 'cpu', 'nvme' or a section"),
        ({"zero_stage": 3}, r"differently than accelerate's DeepSpeedPlugin: zero_stage is stage here$"),
        (
            {"hf_ds_config": JSON, "offload_param_device": "cpu"},
            r"hf_ds_config is config here, offload_param_device is offload_param here$",
        ),
    ],
)
def test_values_out_of_range_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ZeroPlugin(**arguments)


def test_answers_of_the_launcher_fill_what_code_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.7")
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,gradient_clipping")
    assert ZeroPlugin().zero_stage == 3 and ZeroPlugin().deepspeed_config["gradient_clipping"] == 0.7
    assert ZeroPlugin(stage=1).zero_stage == 1
    plugin = ZeroPlugin(JSON | {"gradient_clipping": "auto"})
    assert plugin.zero_stage == 2 and plugin.deepspeed_config["gradient_clipping"] == 0.7


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"offload_optimizer_device": "cpu"}, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
        ({"offload_param_device": "cpu"}, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}),
        ({"gradient_clipping": 0.5}, {"gradient_clipping": 0.5}),
        ({"gradient_clipping": 0.0}, {"gradient_clipping": 0.0}),
        (
            {"offload_param_device": "nvme", "offload_param_nvme_path": "/scratch"},
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/scratch"}}},
        ),
    ],
)
@pytest.mark.parametrize("launched", [False, True])
def test_arguments_of_the_stock_plugin_fill_keys_that_the_json_lacks(
    arguments: dict[str, Any], expected: dict[str, Any], launched: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Accelerate drops them without a word: nothing was offloaded, and gradients were clipped at the default of 1."""
    given = {"zero_optimization": {"stage": 3}}
    if launched:
        (tmp_path / "ds.json").write_text(json.dumps(given))
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
        for name, value in arguments.items():
            monkeypatch.setenv(f"ACCELERATE_{'' if name == 'gradient_clipping' else 'DEEPSPEED_'}{name.upper()}", str(value))
    for kind in (accelerate.utils.DeepSpeedPlugin, ZeroPlugin) if launched else (accelerate.utils.DeepSpeedPlugin,):
        plugin = kind() if launched else kind(hf_ds_config=given, **arguments)
        assert {key: plugin.deepspeed_config[key] for key in expected} == expected
        assert plugin.hf_ds_config.is_offload() == ("offload" in str(expected))
    assert given == {"zero_optimization": {"stage": 3}}


def test_flags_of_the_launcher_do_not_fill_the_scripts_own_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    for plugin in (accelerate.utils.DeepSpeedPlugin(hf_ds_config=dict(JSON)), ZeroPlugin(JSON)):
        assert "offload_optimizer" not in plugin.deepspeed_config["zero_optimization"]


def test_a_flag_that_contradicts_the_launchers_json_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heard: list[str] = []
    monkeypatch.setattr(script_values, "warn_once", heard.append)
    (tmp_path / "ds.json").write_text(json.dumps(JSON | {"gradient_clipping": 0.5}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.50")
    assert accelerate.utils.DeepSpeedPlugin().zero_stage == 2
    assert len(heard) == 1 and "zero_optimization.stage is 2" in heard[0] and "--zero_stage of `accelerate launch` is 3" in heard[0]


def test_config_file_of_the_launcher_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(JSON))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    assert ZeroPlugin().deepspeed_config["train_micro_batch_size_per_gpu"] == 3
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage")
    with pytest.raises(ValueError, match="following accelerate config variables will be ignored"):
        ZeroPlugin()


def test_auto_that_accelerate_cannot_fill_is_left_to_the_engine() -> None:
    section = {"stage": 3, "reduce_bucket_size": "auto"}
    plugin = ZeroPlugin({"zero_optimization": section, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}})
    assert not plugin.is_auto("zero_optimization.reduce_bucket_size") and plugin.is_auto("optimizer.params.lr")
    plugin.deepspeed_config_process(must_match=False, **{"optimizer.params.lr": 0.5})
    assert plugin.deepspeed_config["optimizer"]["params"] == {"lr": 0.5, "betas": "auto"}
    assert plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] == "auto"


def test_stand_ins_are_accelerates() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = DummyOptim((p for p in [weight]), lr=0.1, weight_decay=0.2)
    assert isinstance(optimizer, accelerate.utils.DummyOptim)
    assert (optimizer.params, optimizer.lr, optimizer.weight_decay) == ([weight], 0.1, 0.2)
    scheduler = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    assert isinstance(scheduler, accelerate.utils.DummyScheduler)
    assert (scheduler.optimizer, scheduler.total_num_steps, scheduler.warmup_num_steps) == (optimizer, 10, 2)


class TextModel(torch.nn.Module):
    """Its sizes stand in the configuration of its text part, as in vision-language models."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.config = types.SimpleNamespace(text_config=types.SimpleNamespace(hidden_size=4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs).pow(2).mean()


def _sizes_in_the_text_config() -> list[float]:
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **dict.fromkeys(keys, "auto")}}
    with trainers.clean_state():
        accelerator = accelerate.Accelerator(deepspeed_plugin=ZeroPlugin(config))
        model = TextModel()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        losses = []
        for _ in range(3):
            loss = model(torch.ones(1, 4))
            accelerator.backward(loss)
            losses.append(loss.item())
        accelerator.end_training()
    return losses


def test_model_with_sizes_in_its_text_config_is_prepared() -> None:
    """accelerate asks `model.config.hidden_size` and raises ValueError for vision-language models; ours does not ask."""
    losses = ranks.run_ranks(_sizes_in_the_text_config, 1, group=False)[0]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3
