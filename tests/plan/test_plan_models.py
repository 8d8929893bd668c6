"""Descriptions of models that are none: `hf-zero plan` says what is wrong in one line, soon, and never with a traceback."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hf_zero.cli import main
from hf_zero.errors import ConfigError, printable
from hf_zero.plan.inputs import ModelWish
from hf_zero.plan.models import build_model
from tests.fuzz.bounded import bounded_time
from tests.fuzz.guard import fuzzed
from tests.fuzz.mutations import KINDS, NUMBERS

CONFIG = json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8, "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"], "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0,
    "tie_word_embeddings": True, "id2label": {"0": "a"},
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "hidden_act": "silu",
    "num_key_value_heads": 1, "vocab_size": 16, "rms_norm_eps": 1e-6, "architectures": ["LlamaForCausalLM"], "head_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": 8,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "architectures": None}
SEEDS = (GPT2, LLAMA, MIXTRAL)
OTHERS = (
    "Trainer", "nn", "OrderedDict", "AutoModel", "PreTrainedModel", "pipeline", "", "xx", "float99", "__class__", "linear", "dynamic", [5],
    {"a": {"b": 1}}, 10**6, 2**20, 3, 0, -3, 1.5, True,
)  # fmt: skip


def say(capsys: pytest.CaptureFixture[str], folder: Path, content: dict[str, Any], *words: str) -> str:
    (folder / "config.json").write_text(json.dumps(content))
    with bounded_time():
        assert main(["plan", str(folder), "--config", CONFIG, "--sequence", "4", "--device", "cpu", *words]) == 2
    found = capsys.readouterr().err
    assert "Traceback" not in found and found.count("hf-zero plan: ") == 1, found
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": ["gpt2"]}, "its model_type is"),
        ({"model_type": None}, "its model_type is None"),
        ({"model_type": {"a": []}}, "its model_type is"),
        ({"model_type": "\x1b]0;gpt2"}, r"\x1b]0;gpt2"),
        ({"architectures": 5}, "architectures of the configuration is 5"),
        ({"architectures": [5]}, "a list of class names is allowed"),
        ({"activation_function": "gelo"}, "KeyError: 'gelo'"),
        ({"n_layer": -1}, "n_layer is -1; whole numbers from 0 to 4,096 are allowed"),
        ({"n_layer": 10**6}, "n_layer is 1000000"),
        ({"text_config": {"num_hidden_layers": [1, 10**9]}}, "num_hidden_layers is [1, 1000000000]"),
        ({"num_local_experts": 10**7}, "num_local_experts is 10000000"),
        ({"vocab_size": 10**30}, "cannot be built"),
        ({"n_embd": -8}, "negative dimension"),
        ({"n_head": 0}, "cannot be built"),
        ({"quantization_config": 5}, "cannot be built"),
        ({"dtype": "xx"}, "the configuration of gpt2"),
    ],
)
def test_what_is_no_model_is_said_in_a_line(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in say(capsys, tmp_path, {**GPT2, **change})


def test_settings_of_the_command_line_are_looked_at_likewise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "n_layer is -1" in say(capsys, tmp_path, GPT2, "--set", "n_layer=-1")
    assert main(["plan", "gpt2", "--config", CONFIG, "--set", "n_layer=100000"]) == 2
    assert "n_layer is 100000" in capsys.readouterr().err


def test_a_model_of_too_many_modules_is_not_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_zero.plan.models._MOST_MODULES", 20)
    assert "more than 20 modules" in say(capsys, tmp_path, {**GPT2, "n_layer": 5})


def test_explain_reads_the_same_files_with_the_same_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    for words in (["explain", CONFIG, "--model", str(tmp_path)], ["explain", "--tp", "2", "--model", str(tmp_path)]):
        assert main(words) == 1
        assert "it is a device; expected a regular file" in capsys.readouterr().err


def changed(random: Random) -> dict[str, Any]:
    content = copy.deepcopy(random.choice(SEEDS))
    for _ in range(random.randint(1, 3)):
        block = content
        if random.random() < 0.15 and isinstance(content.get("rope_parameters"), dict):
            block = content["rope_parameters"]
        key = (
            random.choice(sorted(block))
            if block and random.random() < 0.9
            else random.choice(["quantization_config", "layer_types", "dtype"])
        )
        value = random.choice([*NUMBERS, *KINDS, *OTHERS])
        block[key] = [value] if random.random() < 0.1 else copy.deepcopy(value)
        if random.random() < 0.1:
            del block[key]
    return content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    for content in SEEDS:  # what is loaded the first time takes seconds
        (found / "config.json").write_text(json.dumps(content))
        build_model(ModelWish(str(found), {}))
    return found


def check(random: Random, folder: Path) -> None:
    """Build a model, or raise a named error, in bounded time of the processor."""
    (folder / "config.json").write_text(json.dumps(changed(random)))
    with bounded_time():
        try:
            build_model(ModelWish(str(folder), {}))
        except ConfigError as error:
            assert printable(str(error)) == str(error) and len(str(error)) < 2000


test_descriptions, test_many_descriptions = fuzzed(check)
