"""``hf-zero convert``: DeepSpeed's folders resume, models of Hugging Face come and go, torch.distributed.checkpoint too."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_zero import cli
from hf_zero.checkpoint.convert.run import Conversion, convert
from hf_zero.checkpoint.convert.torch_files import load_torch_file
from hf_zero.checkpoint.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict, get_fp32_state_dict_from_zero_checkpoint
from hf_zero.errors import CheckpointError
from hf_zero.utils import newest_trainer_checkpoint
from tests.checkpoint.make_deepspeed_checkpoint import CLIENT_STATE, SAVED_STEPS, Model, config_of, optimizer_of, scale_of, train
from tests.support import ranks
from tests.support.checkpoints import differences, full_state, start, steps
from tests.support.memory import peak_growth
from tests.support.models import CASES

GOLDEN = Path(__file__).parents[1] / "golden"
DEEPSPEED = sorted(GOLDEN.glob("deepspeed_*"))


# -- from DeepSpeed -----------------------------------------------------------------------------------------------------


def _resume(folder: str, stage: int, dtype: str) -> tuple[list[float], Any, dict[str, Any], list[float]]:
    import hf_zero

    model = Model()
    torch.nn.init.zeros_(model.norm.weight)  # whatever is there is overwritten
    engine = hf_zero.initialize(model=model, optimizer=optimizer_of(model), config=config_of(stage, dtype))[0]
    _, client_state = engine.load_checkpoint(folder)
    state = {name: value for name, value in full_state(engine).items() if name.startswith("master")}
    assert engine.global_steps == SAVED_STEPS and engine.lr_scheduler.last_batch_iteration == SAVED_STEPS - 1
    scales = [scale_of(engine)]
    losses = train(engine, SAVED_STEPS, 2, ranks.rank(), dtype)
    scales.append(scale_of(engine))
    engine.destroy()
    return losses, client_state, state, scales


def _folders() -> list[Any]:
    fast = ("stage1_fp16_2", "stage2_fp32_2", "stage3_bf16_2", "_round", "_sub", "_universal")
    return [pytest.param(path, id=path.name, marks=() if path.name.endswith(fast) else pytest.mark.slow) for path in DEEPSPEED]


@pytest.mark.fast_rows("deepspeed_stage3_bf16_2")
@pytest.mark.parametrize("folder", _folders())
def test_a_run_of_deepspeed_goes_on(folder: Path, tmp_path: Path) -> None:
    """Weights are DeepSpeed's bit for bit; with wrong moments, steps, rates or loss scales the next losses or scales would be others."""
    expected = json.loads((folder / "expected.json").read_text())
    weights = load_file(folder / "expected.safetensors")
    convert(Conversion(folder, tmp_path, trust_pickle=True, quiet=True))
    for stage in (expected["stage"], 3 - expected["stage"]):
        answers = ranks.run_ranks(_resume, len(expected["losses"]), str(tmp_path), stage, expected["dtype"])
        for (losses, client_state, masters, scales), known in zip(answers, expected["losses"], strict=True):
            assert client_state == CLIENT_STATE and scales == expected.get("scales", [1.0, 1.0])
            assert masters and all(torch.equal(value, weights[name.removeprefix("master ")]) for name, value in masters.items())
            assert losses == pytest.approx(known, rel=1e-5 if expected["dtype"] == "fp32" else 2e-2)
    ours = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(weights) <= set(ours) and all(torch.equal(ours[name].float(), weights[name].float()) for name in weights)


def test_files_of_trainer_come_along(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "deepspeed_stage2_bf16_1", tmp_path / "old" / "checkpoint-3")
    (tmp_path / "old" / "checkpoint-3" / "trainer_state.json").write_text('{"global_step": 3}')
    (tmp_path / "old" / "checkpoint-3" / "zero_to_fp32.py").write_text("DeepSpeed's own")
    target = tmp_path / "new" / "checkpoint-3"
    convert(Conversion(tmp_path / "old" / "checkpoint-3", target, trust_pickle=True, quiet=True))
    assert (target / "trainer_state.json").read_text() == '{"global_step": 3}'
    assert (target / "latest").read_text() == "global_step3" and "safetensors" in (target / "zero_to_fp32.py").read_text()
    assert newest_trainer_checkpoint(tmp_path / "new") == str(target)


def test_a_pickle_is_not_opened_without_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", str(DEEPSPEED[0]), str(tmp_path / "out")]) == 1
    assert "--trust-pickle" in capsys.readouterr().err and not (tmp_path / "out").exists()


class Trap:
    """Runs code when it is unpickled the usual way."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (open, (self.target, "w"))


def test_a_trusted_pickle_runs_nothing(tmp_path: Path) -> None:
    torch.save({"module": {"w": torch.ones(2)}, "trap": Trap(str(tmp_path / "sprung"))}, tmp_path / "file.pt")
    data = load_torch_file(tmp_path / "file.pt")
    assert torch.equal(data["module"]["w"], torch.ones(2)) and data["trap"].kind.endswith("open")
    assert not (tmp_path / "sprung").exists()
    for content in (b"", b"no pickle", pickle.dumps([1])[:-1]):
        (tmp_path / "broken.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot read .*broken.pt"):
            load_torch_file(tmp_path / "broken.pt")


def test_metadata_beside_a_model_selects_nothing_that_runs_code(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / ".metadata").write_bytes(pickle.dumps(Trap(str(tmp_path / "sprung"))))
    torch.save({"w": torch.ones(2)}, source / "pytorch_model.bin")
    convert(Conversion(source, tmp_path / "out", trust_pickle=True, quiet=True))
    assert not (tmp_path / "sprung").exists() and (tmp_path / "out" / "global_step0").is_dir()
    (source / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"cannot read .*\.metadata: .*builtins\.open|io\.open"):
        convert(Conversion(source, tmp_path / "again", trust_pickle=True, quiet=True))
    assert not (tmp_path / "sprung").exists()


def test_an_object_of_a_distributed_checkpoint_runs_nothing(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    content = {"model.w": torch.ones(2), "optim.param_groups": [{"lr": 0.1, "trap": Trap(str(tmp_path / "sprung"))}]}
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(Conversion(tmp_path / "dcp", tmp_path / "hf", to="hf", quiet=True))
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], torch.ones(2))
    assert not (tmp_path / "sprung").exists()


def test_a_damaged_archive_is_refused_by_its_checksum(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(100)}, tmp_path / "file.pt")
    data = bytearray((tmp_path / "file.pt").read_bytes())
    data[data.index(bytes(400)) + 200] = 1  # inside the tensor
    (tmp_path / "file.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot read .*file.pt: its member data/0 is damaged"):
        load_torch_file(tmp_path / "file.pt")


def test_links_out_of_a_model_folder_are_not_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cache of the Hub is links into its blobs: those come along."""
    repository = tmp_path / "hub" / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, blobs / "77")
    (blobs / "88").write_text('{"dtype": "bfloat16"}')
    (tmp_path / "secret_key").write_text("secret")
    for name, target in {
        "model.safetensors": "../../blobs/77",
        "config.json": "../../blobs/88",
        "tokenizer.model": str(tmp_path / "secret_key"),
        "vocab.txt": "../../../../secret_key",
    }.items():
        (snapshot / name).symlink_to(target)
    from hf_zero.observe import logger

    logger.propagate = True
    try:
        convert(Conversion(snapshot, tmp_path / "hf", to="hf", quiet=True))
    finally:
        logger.propagate = False
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"dtype": "float32"}
    assert "tokenizer.model is a link to" in caplog.text and "secret_key, outside of its folder" in caplog.text


def test_help_says_what_becomes_of_pickles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["convert", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "read pickle files (*.pt, *.bin): only tensors and plain values are read; no code in them is imported or run" in told


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("*rank_1_*optim_states.pt", "2 ranks, but has 1 files"),
        ("zero_pp_rank_1_*model_states.pt", "has 1 files"),
        ("*model*", "has no .*model_states"),
    ],
)
def test_missing_files_of_deepspeed_are_named(tmp_path: Path, lost: str, message: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / "deepspeed_stage3_bf16_2", folder)
    for path in (folder / f"global_step{SAVED_STEPS}").glob(lost):
        path.unlink()
    with pytest.raises(CheckpointError, match=message):
        convert(Conversion(folder, tmp_path / "out", trust_pickle=True, quiet=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("ending", "lost", "message"),
    [
        ("stage1_fp16_2", "zero/optimizer_state.pt", "zero/optimizer_state.pt"),
        ("stage1_fp16_2", "zero/entry.weight/fp32.pt", "zero/entry.weight/fp32.pt"),
        ("stage1_fp16_2", "zero/entry.weight/exp_avg.pt", "entry.weight of the same group .*; some are missing"),
        ("stage1_fp16_2", "zero/entry.weight/step.pt", "entry.weight has optimizer states, but their step is neither in step.pt nor in"),
        ("stage3_fp32_2_sub", "zero_pp_rank_1_mp_rank_00_model_states.pt", "2 ranks, but has 1 files"),
    ],
)
def test_missing_files_of_a_universal_checkpoint_are_named(tmp_path: Path, ending: str, lost: str, message: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / f"deepspeed_{ending}_universal", folder)
    convert(Conversion(folder, tmp_path / "whole", trust_pickle=True, quiet=True))
    (folder / f"global_step{SAVED_STEPS}_universal" / lost).unlink()
    with pytest.raises(CheckpointError, match=message):
        convert(Conversion(folder, tmp_path / "out", trust_pickle=True, quiet=True))
    assert not (tmp_path / "out").exists()


def test_a_universal_checkpoint_with_parameters_at_wrong_places_is_refused(tmp_path: Path) -> None:
    """With round_robin_gradients, ds_to_universal writes the elements of other parameters."""
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / "deepspeed_stage1_fp16_2_universal", folder)
    path = folder / f"global_step{SAVED_STEPS}_universal" / "zero" / "entry.weight" / "fp32.pt"
    value = load_torch_file(path)["param"]
    path.unlink()  # a mapped file must not change
    torch.save({"param": value.flip(0).clone()}, path)
    with pytest.raises(CheckpointError, match=r"the master of entry.weight is not the weight .*round_robin_gradients"):
        convert(Conversion(folder, tmp_path / "out", trust_pickle=True, quiet=True))
    assert not (tmp_path / "out").exists()


def test_a_tied_name_that_the_module_lacks_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / "deepspeed_stage1_fp32_2", folder)
    path = next((folder / f"global_step{SAVED_STEPS}").glob("mp_rank_00_model_states.pt"))
    state = torch.load(path, weights_only=False)
    alias = next(iter(state["shared_params"]))
    state["module"][f"{alias}x"] = state["module"].pop(alias)
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=f"shared_params lists '{alias}'"):
        convert(Conversion(folder, tmp_path / "out", trust_pickle=True, quiet=True))


# -- between ours and the others ------------------------------------------------------------------------------------------


def _save_and_expect(folder: str) -> dict[str, Any]:
    engine = start(3, "bf16")
    steps(engine, 0, 3, "bf16")
    engine.save_checkpoint(folder, client_state={"epoch": 1})
    state = full_state(engine)
    engine.destroy()
    return state


def _load_and_compare(folder: str, expected: dict[str, Any]) -> list[str]:
    engine = start(2, "bf16", seed=5)
    engine.load_checkpoint(folder)
    wrong = [name for name in differences(full_state(engine), expected) if name != "scaler"]
    engine.destroy()
    return wrong


def test_to_torch_distributed_checkpoint_and_back(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    expected = ranks.run_ranks(_save_and_expect, 2, str(tmp_path / "ours"))[0]
    convert(Conversion(tmp_path / "ours", tmp_path / "dcp", to="dcp", quiet=True))
    names = ("model.entry.weight", "optim.state.entry.weight.exp_avg")
    state = {name: torch.empty(expected["master entry.weight"].shape) for name in names}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state["model.entry.weight"], expected["master entry.weight"])
    assert torch.equal(state["optim.state.entry.weight.exp_avg"], expected["exp_avg entry.weight"])
    convert(Conversion(tmp_path / "dcp", tmp_path / "back", quiet=True))
    for wrong in ranks.run_ranks(_load_and_compare, 2, str(tmp_path / "back"), expected):
        assert wrong == []


def test_a_checkpoint_that_torch_wrote_for_a_plain_model(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(Conversion(tmp_path / "dcp", tmp_path / "ours", tag="t", quiet=True))
    index = json.loads((tmp_path / "ours" / "t" / "index.json").read_text())
    assert index["optimizer"]["states"] == ["exp_avg", "exp_avg_sq"] and len(index["optimizer"]["scalars"]) == 4
    assert [group["values"]["lr"] for group in index["optimizer"]["groups"]] == [0.25]
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ours")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items()) and len(found) == 4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_to_a_model_of_hugging_face_in_several_files(tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "hf"
    arguments = [str(GOLDEN / "checkpoint_v1_adamw"), str(target), "--dtype", dtype, "--max-shard-size", "1KB", "--quiet"]
    assert cli.main(["convert", *arguments]) == 0
    said = capsys.readouterr().out
    assert f"of {dtype} weights" in said and "no config.json is beside the checkpoint" in said
    index = json.loads((target / "model.safetensors.index.json").read_text())
    parts = {name: load_file(target / name) for name in set(index["weight_map"].values())}
    assert len(parts) > 2 and index["metadata"]["total_size"] == sum(value.nbytes for part in parts.values() for value in part.values())
    expected = get_fp32_state_dict_from_zero_checkpoint(GOLDEN / "checkpoint_v1_adamw")
    assert set(index["weight_map"]) == set(expected) - {"twin.weight"}
    for name, file in index["weight_map"].items():
        value = expected[name].to(torch.bfloat16) if dtype == "bf16" and expected[name].is_floating_point() else expected[name]
        assert torch.equal(parts[file][name], value), name


@pytest.mark.parametrize("script", [False, True])
def test_a_model_replaces_one_in_other_files(tmp_path: Path, script: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """``from_pretrained`` prefers one file to an index, so files of the former model would be loaded in place of the new one."""
    target, source = tmp_path / "hf", GOLDEN / "checkpoint_v1_adamw"
    other = ("model-7.safetensors", "model-00009-of-00009.safetensors", "adapter_model.safetensors")  # not in any index of the model

    def write(size: str) -> set[str]:
        if script:
            convert_zero_checkpoint_to_fp32_state_dict(source, target, max_shard_size=size)
        else:
            convert(Conversion(source, target, to="hf", max_shard_bytes=1000 if size == "1KB" else 10**9, quiet=True))
        return {path.name for path in target.iterdir()}

    target.mkdir()
    for name in other:
        (target / name).write_bytes(b"")
    alone = write("1GB")
    several = write("1KB")
    assert alone == {"model.safetensors", *other}
    assert "model.safetensors.index.json" in several and "model.safetensors" not in several and {*other} < several
    assert write("1GB") == alone
    if script:
        capsys.readouterr()
        convert_zero_checkpoint_to_fp32_state_dict(source, target, safe_serialization=False)
        assert f"from_pretrained prefers {target / 'model.safetensors'}" in capsys.readouterr().out


def _load_weights(folder: str, stage: int) -> dict[str, torch.Tensor]:
    import hf_zero

    model = CASES["gpt2"].build()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    engine.load_checkpoint(folder, load_module_only=True)
    state = engine._consolidated_16bit_state_dict()
    engine.destroy()
    return state or {}


@pytest.mark.parametrize("form", ["safetensors", "several files", "pickle"])
def test_a_model_of_hugging_face_becomes_a_checkpoint(tmp_path: Path, form: str) -> None:
    model = CASES["gpt2"].build()
    source = tmp_path / "hf"
    if form == "pickle":
        source.mkdir()
        torch.save(model.state_dict(), source / "pytorch_model.bin")
    else:
        model.save_pretrained(source, max_shard_size="20KB" if form == "several files" else "5GB")
    if form == "pickle":
        with pytest.raises(CheckpointError, match="--trust-pickle"):
            convert(Conversion(source, tmp_path / "ours", quiet=True))
    convert(Conversion(source, tmp_path / "ours", tag="hf", trust_pickle=form == "pickle", quiet=True))
    loaded = ranks.run_ranks(_load_weights, 2, str(tmp_path / "ours"), 3)[0]
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name


def test_config_and_tokenizer_come_along_and_the_model_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = CASES["gpt2"].build()
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(tmp_path / "ck")
    model.save_pretrained(tmp_path / "hf")
    convert(Conversion(tmp_path / "hf", tmp_path / "ck", tag="t", quiet=True))
    convert(Conversion(tmp_path / "ck", tmp_path / "out", quiet=True))
    back, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and back.dtype == torch.float32
    assert all(torch.equal(back.state_dict()[name], value) for name, value in model.state_dict().items())


def _header(tensors: Any) -> bytes:
    text = json.dumps(tensors).encode() if not isinstance(tensors, bytes) else tensors
    return len(text).to_bytes(8, "little") + text


_ONE = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
HOSTILE_HEADERS = {
    "endless header": b"\xff" * 8,
    "header longer than the file": (1 << 20).to_bytes(8, "little") + b"{}",
    "no JSON": _header(b"{" * 64),
    "deep JSON": _header(b"[" * 100_000),
    "offsets outside": _header({"w": {**_ONE, "data_offsets": [0, 1 << 40]}}),
    "offsets backwards": _header({"w": {**_ONE, "data_offsets": [16, 0]}}),
    "overlap": _header({"v": _ONE, "w": _ONE}),
    "shape that overflows": _header({"w": {**_ONE, "shape": [1 << 32, 1 << 32]}}),
    "negative shape": _header({"w": {**_ONE, "shape": [-4]}}),
    "unknown type": _header({"w": {**_ONE, "dtype": "O8"}}),
}


def _hostile(header: bytes) -> Any:
    return lambda folder: (folder / "model.safetensors").write_bytes(header + bytes(16))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not in a known format"),
        (lambda folder: save_file({}, folder / "model.safetensors"), "holds no parameters"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x00" * 20), "cannot read .*model.safetensors"),
        *((_hostile(header), "cannot read .*model.safetensors") for header in HOSTILE_HEADERS.values()),
        (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'), "lists '../x'"),
        (lambda folder: (folder / "latest").write_text("gone"), "no checkpoint folder .*gone"),
    ],
    ids=["empty", "nothing", "broken", *HOSTILE_HEADERS, "hostile index", "stale latest"],
)
def test_what_cannot_be_converted_is_named(tmp_path: Path, make: Any, message: str) -> None:
    (tmp_path / "in").mkdir()
    make(tmp_path / "in")
    with pytest.raises(CheckpointError, match=message):
        convert(Conversion(tmp_path / "in", tmp_path / "out", quiet=True))
    assert not (tmp_path / "out").exists()


def test_conversion_holds_a_window_and_not_the_model(tmp_path: Path) -> None:
    save_file({f"w{number}": torch.full((2**20,), float(number)) for number in range(16)}, tmp_path / "model.safetensors")  # 64 MiB
    grown = peak_growth(lambda: convert(Conversion(tmp_path, tmp_path / "ours", tag="a", quiet=True)))
    assert grown < 24 * 2**20, grown
    grown = peak_growth(lambda: convert(Conversion(tmp_path / "ours", tmp_path / "hf", quiet=True)))
    assert grown < 24 * 2**20, grown
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w7"], torch.full((2**20,), 7.0))
