"""Arguments of save_checkpoint and load_checkpoint, client state, exports, zero_to_fp32."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_zero.errors import CheckpointError
from tests.support import ranks
from tests.support.checkpoints import build, differences, full_state, start, steps
from tests.support.models import CASES
from tests.support.rows import slow_but

CLIENT_STATE = {
    "epoch": 3,
    "ratio": float("inf"),
    "pair": (1, ("a", None)),
    "names": {"x", "y"},
    7: "integer key",
    "order": OrderedDict(b=1, a=2),
    "mean": np.float64(0.25),
    "history": np.arange(6, dtype=np.int16).reshape(2, 3),
    "best": torch.arange(4, dtype=torch.bfloat16),
    "dtype": torch.float16,
    "where": Path("a/b"),
    "raw": b"\x00\xff",
}


def _client_state(folder: str, save: bool) -> dict[str, Any]:
    engine = start(2)
    if save:
        # Random states, say, are a rank's own; what is equal to rank 0's is stored once.
        own = {1: {"other": torch.tensor([1, 2]), "rank": 1}, 2: {"other": torch.tensor([1, 3]), "rank": 1}}
        engine.save_checkpoint(folder, "pytorch_model", own.get(ranks.rank(), CLIENT_STATE))
    path, state = engine.load_checkpoint(folder, "pytorch_model")
    engine.destroy()
    assert path == str(Path(folder) / "pytorch_model")
    return state


def test_client_state_comes_back_with_its_types_on_the_rank_that_gave_it(tmp_path: Path) -> None:
    first, second, third = ranks.run_ranks(_client_state, 3, str(tmp_path), True)
    assert second["other"].tolist() == [1, 2] and third["other"].tolist() == [1, 3]
    again, other = ranks.run_ranks(_client_state, 2, str(tmp_path), False)
    assert other["other"].tolist() == [1, 2]
    for state in (first, again, ranks.run_ranks(_client_state, 4, str(tmp_path), False)[3]):  # a rank that there was not: rank 0's
        assert list(state) == list(CLIENT_STATE)
        for key, expected in CLIENT_STATE.items():
            assert type(state[key]) is type(expected), key
            if isinstance(expected, (torch.Tensor, np.ndarray)):
                assert state[key].dtype == expected.dtype and (state[key] == expected).all() and state[key].shape == expected.shape
            else:
                assert state[key] == expected, key


def _refused(folder: str) -> str:
    engine = start(3)
    state = {"fine": 1, "callbacks": {"early": [object()]}} if ranks.rank() == 0 else {}
    with pytest.raises(Exception) as caught:
        engine.save_checkpoint(folder, "t", state)
    engine.destroy()
    check_pickled(f"{folder}-pickled")
    return f"{type(caught.value).__name__}: {caught.value}"


class Meter:
    """A class of a script's own."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total = total


def check_pickled(folder: str) -> None:
    """Objects of any class travel where the configuration says so, and are not read where it does not."""
    told = start(3, hf_zero={"pickle_client_state": True})
    told.save_checkpoint(folder, "t", {"epoch": 2, "meter": Meter(torch.arange(3))})
    assert told.load_checkpoint(folder, "t")[1]["meter"].total.tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match=r"client_state\['hook'\], a builtins\.function, cannot be pickled"):
        told.save_checkpoint(folder, "u", {"hook": lambda: None})
    told.destroy()
    plain = start(3)
    with pytest.raises(CheckpointError, match="holds pickled values.* set hf_zero.pickle_client_state to true"):
        plain.load_checkpoint(folder, "t")
    plain.destroy()


def test_what_needs_pickle_is_refused_by_name_before_a_byte_is_written(tmp_path: Path) -> None:
    answers = ranks.run_ranks(_refused, 2, str(tmp_path / "new"))
    assert answers[0] == answers[1]
    assert answers[0].startswith("CheckpointError") and "client_state['callbacks']['early'][0] is a builtins.object" in answers[0]
    assert not (tmp_path / "new").exists()


def _tags(folder: str) -> None:
    engine = start(1)
    assert engine.load_checkpoint(folder) == (None, None)
    assert engine.load_checkpoint(folder + "/absent") == (None, None)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    engine.save_checkpoint(folder, "side", save_latest=False)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["global_step2", "latest", "side", "zero_to_fp32.py"]
    assert (Path(folder) / "latest").read_text() == "global_step2"
    steps(engine, 2, 1)
    engine.save_checkpoint(folder, "side")  # over the former one
    assert (Path(folder) / "latest").read_text() == "side"
    steps(engine, 3, 1)
    assert engine.load_checkpoint(folder)[0].endswith("side") and engine.global_steps == 3
    assert engine.load_checkpoint(folder, tag="global_step2")[0].endswith("global_step2") and engine.global_steps == 2
    engine.save_checkpoint(folder, 17)
    assert engine.load_checkpoint(folder, 17)[0].endswith("17")
    with pytest.raises(CheckpointError, match=rf"{folder}/17 is one checkpoint; give the folder that holds it: .*'{folder}', tag='17'"):
        engine.load_checkpoint(folder + "/17")
    with pytest.raises(CheckpointError, match=r"client_state is a str; a dict is allowed, such as \{'epoch': 3\}"):
        engine.save_checkpoint(folder, "text", client_state="hello")
    for given in (None, "", None if ranks.rank() else folder):  # the last: on rank 1 alone
        with pytest.raises(ValueError, match=r"^save_checkpoint\(\): save_dir is (None|''), allowed is a path") as caught:
            engine.save_checkpoint(given)
        assert isinstance(caught.value, CheckpointError)
    with pytest.raises(CheckpointError, match=r"client_state is a str.*\(rank 0\); save_dir is None.*\(rank 1\)") as caught:
        engine.save_checkpoint(None if ranks.rank() else folder, client_state={} if ranks.rank() else "hello")
    assert not isinstance(caught.value, ValueError), "another error on rank 0"
    assert engine.load_checkpoint(str(Path(folder).parent)) == (None, None), "a warning names the folder in it"
    engine.destroy()


def test_tags_and_latest(tmp_path: Path) -> None:
    ranks.run_ranks(_tags, 2, str(tmp_path))


def _partial_loads(folder: str, stage: int) -> None:
    engine = start(stage, "bf16")
    steps(engine, 0, 3, "bf16")
    engine.save_checkpoint(folder)
    saved = full_state(engine)
    engine.destroy()

    def load(extra: dict[str, Any] | None = None, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        engine = start(stage, "bf16", seed=5, **(extra or {}))
        steps(engine, 7, 1, "bf16")
        before = full_state(engine)
        engine.load_checkpoint(folder, **arguments)
        after = full_state(engine)
        engine.destroy()
        return before, after

    def same(state: dict[str, Any], expected: dict[str, Any]) -> set[str]:
        different = {name.split()[0] for name in differences(state, expected)}
        return {name.split()[0] for name in expected} - different

    before, after = load(load_module_only=True)
    assert {"weight", "buffer", "master"} <= same(after, saved)
    assert {"exp_avg", "step", "scheduler", "counters"} <= same(after, before)

    before, after = load(load_optimizer_states=False)
    assert {"weight", "master", "scheduler", "counters"} <= same(after, saved)
    assert {"exp_avg", "exp_avg_sq", "step"} <= same(after, before)

    before, after = load(load_lr_scheduler_states=False)
    assert {"weight", "master", "exp_avg", "step", "counters", "group"} <= same(after, saved)
    assert "scheduler" in same(after, before)

    low = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "load_from_fp32_weights": False}}
    before, after = load(low, load_optimizer_states=False)
    assert "weight" in same(after, saved) and "master" not in same(after, saved)
    for name, value in after.items():
        if name.startswith("master"):
            assert torch.equal(value, saved[name.replace("master", "weight")].float()), name


@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
def test_parts_of_a_checkpoint(tmp_path: Path, stage: int) -> None:
    ranks.run_ranks(_partial_loads, 2, str(tmp_path), stage)


def _without_frozen(folder: str, stage: int) -> None:
    engine = start(stage, "bf16")
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    saved = full_state(engine)
    engine.destroy()
    index = json.loads((Path(folder) / "global_step0" / "index.json").read_text())
    assert sorted(index["excluded"]) == ["frozen.weight", "table"]
    stored = {param["name"] for unit in index["units"] for param in unit["params"]} | {loose["name"] for loose in index["loose"]}
    assert not stored & set(index["excluded"])
    for strict in (False, True):
        engine = start(stage, "bf16", seed=5)
        own = full_state(engine)
        engine.load_checkpoint(folder, load_module_strict=strict)
        after = full_state(engine)
        left = {"weight frozen.weight", "weight table"}
        assert set(differences(after, saved)) == left
        assert all(torch.equal(after[name], own[name]) for name in left)
        engine.destroy()


@pytest.mark.slow  # fast: `test_parts_of_a_checkpoint`
@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_frozen_parameters_left_out_keep_the_values_of_the_model(tmp_path: Path, stage: int) -> None:
    ranks.run_ranks(_without_frozen, 2, str(tmp_path), stage)


def _custom(folder: str, stage: int) -> None:
    engine = start(stage, "bf16")
    engine.save_checkpoint(folder)
    saved = full_state(engine)
    engine.destroy()
    engine = start(stage, "bf16", seed=5)

    def load(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        assert "twin.weight" in src
        dst.load_state_dict(src)

    engine.load_checkpoint(folder, custom_load_fn=load, load_optimizer_states=False)
    assert [name for name in differences(full_state(engine), saved) if name.startswith(("weight", "buffer", "master"))] == []
    engine.destroy()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_custom_load_function_sees_whole_tensors(tmp_path: Path, stage: int) -> None:
    ranks.run_ranks(_custom, 2, str(tmp_path), stage)


def _engine_without_optimizer(folder: str, stage: int) -> dict[str, torch.Tensor]:
    import hf_zero

    trained = start(stage)
    steps(trained, 0, 2)
    trained.save_checkpoint(folder)
    expected = {name: value for name, value in full_state(trained).items() if name.startswith("weight")}
    trained.destroy()
    engine = hf_zero.initialize(model=build(5), config={"train_batch_size": 2, "zero_optimization": {"stage": stage}})[0]
    engine.load_checkpoint(folder)
    with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
        for name, param in engine.module.named_parameters():
            assert torch.equal(param.data, expected[f"weight {name}"]), name
    engine.save_checkpoint(folder, "inference")
    engine.destroy()
    trained = start(stage, seed=6)
    with pytest.raises(hf_zero.errors.CheckpointError, match="load_optimizer_states=False"):
        trained.load_checkpoint(folder, "inference")
    trained.load_checkpoint(folder, "inference", load_optimizer_states=False)
    assert [name for name in differences(full_state(trained), expected) if name in expected] == []
    trained.destroy()
    return expected


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_engine_without_optimizer_loads_and_saves(tmp_path: Path, stage: int) -> None:
    ranks.run_ranks(_engine_without_optimizer, 2, str(tmp_path), stage)


def _groups_that_differ(folder: str) -> str:
    import hf_zero

    engine = start(2)
    steps(engine, 0, 1)
    engine.save_checkpoint(folder, "t")
    engine.destroy()
    model = build()
    one = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    engine = hf_zero.initialize(
        model=model, optimizer=one, config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    )[0]
    with pytest.raises(hf_zero.errors.CheckpointError) as caught:
        engine.load_checkpoint(folder, "t")
    engine.load_checkpoint(folder, "t", load_optimizer_states=False)
    engine.destroy()
    return str(caught.value)


def test_groups_that_cannot_be_matched_are_named(tmp_path: Path) -> None:
    answers = ranks.run_ranks(_groups_that_differ, 2, str(tmp_path))
    assert answers[0] == answers[1]
    assert "weight_decay 0.1 and 0.0" in answers[0] and "entry.weight" in answers[0]


# -- weights for others ---------------------------------------------------------------------------------------------------


def _save_for_script(folder: str, stage: int, dtype: str) -> dict[str, Any]:
    engine = start(stage, dtype)
    steps(engine, 0, 2, dtype)
    engine.save_checkpoint(folder)
    state = full_state(engine)
    engine.destroy()
    return state


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_to_fp32_gives_the_masters(tmp_path: Path, stage: int) -> None:
    from hf_zero.checkpoint.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

    expected = ranks.run_ranks(_save_for_script, 2, str(tmp_path), stage, "bf16")[0]
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(weights) == set(build().state_dict())
    for name, value in weights.items():
        known = expected.get(
            f"master {name}", expected.get(f"weight {name}", expected.get(f"buffer {name}", expected.get("master head.weight")))
        )
        assert value.dtype == (torch.float32 if known.is_floating_point() else known.dtype)
        assert torch.equal(value, known.to(value.dtype)), name
    model = load_state_dict_from_zero_checkpoint(build(9), tmp_path, tag="global_step2")
    assert torch.equal(model.entry.weight, expected["master entry.weight"])
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert set(weights) - set(trained) == {"frozen.weight", "table"}

    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "small", max_shard_size="1KB")
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
    parts = sorted({*index["weight_map"].values()})
    assert len(parts) > 2
    joined = {name: value for part in parts for name, value in load_file(tmp_path / "small" / part).items()}
    assert set(joined) == set(weights) - {"twin.weight"} and all(torch.equal(joined[name], weights[name]) for name in joined)


def test_names_of_the_output_and_errors_of_zero_to_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_zero.checkpoint.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    expected = ranks.run_ranks(_save_for_script, 1, str(tmp_path), 2, "bf16")[0]
    for number, (output, written) in enumerate(
        [("pytorch_model.bin", "model.safetensors"), ("new/w.pt", "new/w.pt"), ("folder", "folder/model.safetensors")]
    ):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / str(number) / output, max_shard_size=None)
        hint = "; for torch.load: safe_serialization=False writes pytorch_model.bin" * written.endswith(".safetensors")
        assert f"fp32 weights written to {tmp_path / str(number) / written}{hint}" in capsys.readouterr().out
        assert [str(path.relative_to(tmp_path / str(number))) for path in (tmp_path / str(number)).rglob("*.*")] == [written]
        read = torch.load if written.endswith(".pt") else load_file
        assert torch.equal(read(tmp_path / str(number) / written)["entry.weight"], expected["master entry.weight"])
    inner = tmp_path / "global_step2"
    with pytest.raises(FileNotFoundError, match=f"{inner} is one checkpoint; .* holds it, {tmp_path}, and --tag 'global_step2'"):
        convert_zero_checkpoint_to_fp32_state_dict(inner, tmp_path / "no")
    capsys.readouterr()
    check_files_of_torch(tmp_path, expected["master entry.weight"])
    said = capsys.readouterr().out.splitlines()
    assert said[1] == f"fp32 weights written to {tmp_path}/torch/pytorch_model.bin"
    assert said[2] == f"bf16 weights written to {tmp_path}/several/pytorch_model.bin.index.json"
    check_universal_copy(tmp_path)
    command = [str(tmp_path / "zero_to_fp32.py"), str(tmp_path), str(tmp_path / "out"), "--tag", "absent"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="1"):
        runpy.run_path(command[0], run_name="__main__")
    said = capsys.readouterr().err
    assert "absent is no complete checkpoint" in said and "Traceback" not in said
    monkeypatch.setattr(sys, "argv", [*command, "-d"])
    with pytest.raises(FileNotFoundError, match="absent is no complete checkpoint"):
        runpy.run_path(command[0], run_name="__main__")


def check_files_of_torch(folder: Path, weight: torch.Tensor) -> None:
    """Where no safetensors are asked for, files for torch.load: tied weights under both names, in one file or several, in any type."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict, convert_zero_checkpoint_to_state_dict

    convert_zero_checkpoint_to_state_dict(folder, folder / "default")
    assert [file.name for file in (folder / "default").iterdir()] == ["model.safetensors"]
    convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "torch", safe_serialization=False)
    whole = torch.load(folder / "torch" / "pytorch_model.bin")
    assert whole["twin.weight"] is whole["head.weight"] and torch.equal(whole["entry.weight"], weight)
    build().load_state_dict(whole)
    convert_zero_checkpoint_to_state_dict(folder, folder / "several", dtype="bf16", max_shard_size="1KB", safe_serialization=False)
    named = json.loads((folder / "several" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    parts = {file: torch.load(folder / "several" / file) for file in {*named.values()}}
    assert len(parts) > 1 and set(named) == set(whole)
    for name, file in named.items():
        value = whole[name]
        cast = value.is_floating_point() and name not in dict(build().named_buffers())  # these stay as they were saved
        assert torch.equal(parts[file][name], value.bfloat16() if cast else value), name
    with pytest.raises(ValueError, match="Unsupported output dtype 'int8'"):
        convert_zero_checkpoint_to_state_dict(folder, folder / "no", dtype="int8")


def check_universal_copy(folder: Path) -> None:
    """`ds_to_universal` gives a second checkpoint, which loads as the first does."""
    from deepspeed.checkpoint import ds_to_universal

    from hf_zero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from hf_zero.deepspeed.served.state_files import parse_arguments

    words = ["--input_folder", str(folder / "global_step2"), "--output_folder", str(folder / "global_step2_universal")]
    ds_to_universal.main(parse_arguments(words))
    assert (folder / "latest_universal").read_text() == "global_step2_universal" and (folder / "latest").read_text() == "global_step2"
    first, second = (get_fp32_state_dict_from_zero_checkpoint(folder, tag) for tag in (None, "global_step2_universal"))
    assert all(torch.equal(first[name], second[name]) for name in {*first, *second})
    with pytest.raises(CheckpointError, match="is not a complete hf_zero checkpoint"):
        ds_to_universal.main(parse_arguments([*words[:1], str(folder / "absent"), *words[2:]]))


# Converts, changes a byte of a file, and converts again.
ALONE = """
import runpy, sys
sys.modules["hf_zero"] = None
script, source, target, file = sys.argv[1:]
sys.argv = [script, source, target]
runpy.run_path(script, run_name="__main__")
data = bytearray(open(file, "rb").read())
data[-100] ^= 4
open(file, "wb").write(data)
runpy.run_path(script, run_name="__main__")
"""


def test_zero_to_fp32_stands_alone_and_notices_damage(tmp_path: Path) -> None:
    expected = ranks.run_ranks(_save_for_script, 2, str(tmp_path), 3, "bf16")[0]
    file = next((tmp_path / "global_step2").glob("master-00001*"))
    words = [str(tmp_path / "zero_to_fp32.py"), str(tmp_path), str(tmp_path / "out"), str(file)]
    done = subprocess.run([sys.executable, "-c", ALONE, *words], cwd=tmp_path, capture_output=True, text=True)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["entry.weight"], expected["master entry.weight"]), done.stderr
    assert done.returncode == 1 and file.name in done.stderr and "damaged" in done.stderr and "Traceback" not in done.stderr


def _save_model(folder: str, stage: int, dtype: str) -> list[bool]:
    import hf_zero

    model = CASES["gpt2"].build()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, **({dtype: {"enabled": True}} if dtype else {})}
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config={**config, "zero_optimization": {"stage": stage}})[0]
    answers = [engine.save_16bit_model(folder)]
    if ranks.rank() == 0:
        model.config.save_pretrained(folder)
    engine.destroy()
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    model = CASES["gpt2"].build()
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config={**config, "zero_optimization": zero})[
        0
    ]
    answers.append(engine.save_16bit_model(folder))
    engine.destroy()
    return answers


@pytest.mark.parametrize("stage", [1, 3])
def test_saved_model_loads_with_from_pretrained(tmp_path: Path, stage: int) -> None:
    from transformers import AutoModelForCausalLM

    answers = ranks.run_ranks(_save_model, 2, str(tmp_path), stage, "bf16")
    assert answers == [[True, True]] * 2  # whatever the key says
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"} and not list(tmp_path.glob("*.bin"))
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    expected = CASES["gpt2"].build().to(torch.bfloat16).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value.to(torch.bfloat16), expected[name]), name


def _different_tags(folder: str, validation: str) -> None:
    engine = start(2, checkpoint={"tag_validation": validation})
    own = f"tag-{ranks.rank()}"
    if validation == "fail":
        with pytest.raises(ValueError, match="rank 1 gives the tag 'tag-1', rank 0 'tag-0'"):
            engine.save_checkpoint(folder, own)
        assert not Path(folder, "tag-0").exists()
        engine.save_checkpoint(folder, "same")
        assert Path(engine._get_optimizer_ckpt_name(folder, "same", 0)).is_file()
    else:
        engine.save_checkpoint(folder, own)
        assert Path(folder, "tag-0").is_dir() and not Path(folder, "tag-1").exists()


@pytest.mark.parametrize("validation", ["FAIL", "warn"])
def test_different_tags_on_different_ranks(tmp_path: Path, validation: str) -> None:
    # Not ordered: labels name the tag, which is what differs here.
    ranks.run_ranks(_different_tags, 2, str(tmp_path), validation.lower(), ordered=False)
