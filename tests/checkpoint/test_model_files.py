"""The files of a whole model: layout, division into files, replacement of an earlier save, and failures that leave nothing half."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_zero.checkpoint.model.export import HostCopies
from hf_zero.checkpoint.model.model_files import ModelFiles, PlannedTensor
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.system.sizes import bytes_of
from tests.support import ranks

VALUES = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(10, dtype=torch.bfloat16).view(2, 5),
    "wide": torch.arange(12, dtype=torch.float64).view(3, 4),
    "scalar": torch.tensor(7),
    "none": torch.empty(0, 3),
}


def _write(folder: Path, limit: int, order: list[str]) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("model*")}
    files = ModelFiles(folder, "model.safetensors", [PlannedTensor(n, v.dtype, tuple(v.shape)) for n, v in VALUES.items()], limit)
    for name in order:
        files.write(name, VALUES[name])
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("model*")} == before, "a file has its name before commit"
    files.commit()


def _read(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("limit", [1, 50, 10**9])
def test_any_order_of_writing(limit: int, tmp_path: Path) -> None:
    _write(tmp_path, limit, list(reversed(VALUES)))
    found = _read(tmp_path)
    assert found.keys() == VALUES.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in VALUES.items())
    names = sorted(path.name for path in tmp_path.iterdir())
    if limit == 10**9:
        assert names == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == VALUES.keys() and {*index["weight_map"].values()} == {*names[:-1]}
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in VALUES.values())


def test_files_of_an_earlier_save_go_away(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"another model's")
    _write(tmp_path, 1, list(VALUES))
    _write(tmp_path, 10**9, list(VALUES))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_model.safetensors", "model.safetensors"]


def test_parts_that_no_index_of_this_name_lists_stay(tmp_path: Path) -> None:
    """They may be those of a model that was downloaded; but what would be read in place of the new model goes."""
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"another model's")
    (tmp_path / "model.safetensors").write_bytes(b"the former one")
    _write(tmp_path, 1, list(VALUES))
    names = {path.name for path in tmp_path.iterdir()}
    assert "model-00001-of-00002.safetensors" in names and "model.safetensors" not in names
    parts = names - {"model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    listed = {
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "../model-00001-of-00003.safetensors", "c": "config.json", "d": 5}
    }
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(listed))
    _write(tmp_path, 10**9, list(VALUES))
    assert not (tmp_path / "model-00001-of-00002.safetensors").exists() and (tmp_path / "config.json").exists()
    assert parts and all((tmp_path / name).exists() for name in parts), "the index that was there does not list them"


def test_a_model_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("as it was")
    for name in (".model.safetensors.part", "model.safetensors"):
        (tmp_path / name).symlink_to(tmp_path / "secret")
    _write(tmp_path, 10**9, list(VALUES))
    assert (tmp_path / "secret").read_text() == "as it was" and not (tmp_path / "model.safetensors").is_symlink()
    files = ModelFiles(tmp_path, "model.safetensors", [PlannedTensor("weight", torch.float32, (4, 4))], 100)
    files.abort()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.safetensors.part", "model.safetensors", "secret"]


def test_an_empty_tensor_is_never_written_for_a_whole_one(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path, "model.safetensors", [PlannedTensor("weight", torch.float32, (4, 4))], 100)
    with pytest.raises(CheckpointError, match=r"weight is \(0,\)"):
        files.write("weight", torch.empty(0))
    files.abort()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "expected"), [(5, 5), ("10B", 10), ("2 KB", 2000), ("1.5MiB", 3 * 2**19), ("5GB", 5 * 10**9), ("700", 700)]
)
def test_sizes(text: int | str, expected: int) -> None:
    assert bytes_of(text, "max_shard_size", bare=True) == expected


@pytest.mark.parametrize("wrong", [0, -1, True, "much", "5 apples", 1.5])
def test_wrong_sizes(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        bytes_of(wrong, "max_shard_size", bare=True)


def test_copies_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_SPILL_DIR", str(tmp_path / "spill"))
    host = HostCopies(1)
    copies = {name: host.take(value.t() if value.dim() == 2 else value) for name, value in VALUES.items()}
    assert not list((tmp_path / "spill").iterdir()), "a spilled copy has a name"
    for name, value in VALUES.items():
        assert torch.equal(copies[name], value.t() if value.dim() == 2 else value) and copies[name].is_contiguous()
    assert len({copy.untyped_storage().data_ptr() for copy in copies.values() if copy.numel()}) == 4, "copies share a storage"


def _nowhere_to_spill(folder: Path) -> str:
    import hf_zero
    from hf_zero.checkpoint.model import export

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
    engine = hf_zero.initialize(model=nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), config=config)[0]
    reserve, asked = os.posix_fallocate, []

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        asked.append(nbytes)
        if len(asked) == 3:
            raise OSError(28, "No space left on device")
        reserve(descriptor, offset, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(export.SPILL_VARIABLE, str(folder))
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CheckpointError) as caught:
            engine._zero3_consolidated_16bit_state_dict()
        assert len(asked) == (3 if ranks.rank() == 0 else 0)
        whole = engine._zero3_consolidated_16bit_state_dict()
    assert (whole is not None) == (ranks.rank() == 0)
    return str(caught.value)


def test_no_room_for_a_whole_model_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    texts = ranks.run_ranks(_nowhere_to_spill, 2, tmp_path)
    assert texts[0] == texts[1] and "No space left" in texts[0] and "HF_ZERO_SPILL_DIR" in texts[0]


def test_two_jobs_spill_into_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_SPILL_DIR", str(tmp_path))
    (tmp_path / "hf_zero_mine").write_text("stays")
    first, second = (HostCopies(1).take(torch.full((5,), float(number))) for number in range(2))
    assert first.tolist() == [0.0] * 5 and second.tolist() == [1.0] * 5
    assert [path.name for path in tmp_path.iterdir()] == ["hf_zero_mine"]


def _failing_disk(folder: Path) -> tuple[str, list[str]]:
    import hf_zero

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
    engine = hf_zero.initialize(model=nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), config=config)[0]
    engine.save_16bit_model(folder)
    torch.distributed.barrier()
    before = load_file(folder / "model.safetensors")
    with torch.no_grad(), hf_zero.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module[0].weight.zero_()
    written, write = [], ModelFiles.write

    def full(self: ModelFiles, name: str, value: torch.Tensor) -> None:
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(name)
        write(self, name, value)

    ModelFiles.write = full  # type: ignore[method-assign]
    try:
        engine.save_16bit_model(folder)
        text = "no error"
    except CheckpointError as error:
        text = str(error)
    finally:
        ModelFiles.write = write  # type: ignore[method-assign]
    torch.distributed.barrier()
    after = load_file(folder / "model.safetensors")
    assert all(torch.equal(after[name], value) for name, value in before.items()), "the earlier file was touched"
    return text, sorted(path.name for path in folder.iterdir())


def test_a_full_disk_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    found = ranks.run_ranks(_failing_disk, 2, tmp_path)
    texts = {text for text, _ in found}
    assert len(texts) == 1 and "No space left" in texts.pop() and found[0][1] == ["model.safetensors"]
