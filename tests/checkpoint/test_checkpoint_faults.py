"""Damaged checkpoints and failing writes: one clear error, the same on every rank, and the previous checkpoint stays."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import ranks
from tests.support.background_saves import Slowly
from tests.support.checkpoints import differences, full_state, start, steps

WORLD = 2


def _save_twice(folder: str) -> None:
    engine = start(3, "bf16")
    engine.save_checkpoint(folder)
    steps(engine, 0, 2, "bf16")
    engine.save_checkpoint(folder)
    engine.destroy()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ranks.run_ranks(_save_twice, WORLD, str(folder))
    return folder


def _errors_of_loads(folders: list[str], tag: str) -> list[str]:
    """What one engine says of one folder after the other."""
    engine, said = start(3, "bf16", seed=5), []
    for folder in folders:
        with pytest.raises(Exception) as caught:
            engine.load_checkpoint(folder, tag=tag)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    engine.destroy()
    return said


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A checkpoint that says something else, with a marker that fits."""
    from hf_zero.checkpoint.commit.staging import finalize

    data = json.loads((folder / "index.json").read_text())
    change(data)
    finalize(folder, json.dumps(data))


def _rename_parameter(data: dict[str, Any]) -> None:
    previous = data["units"][0]["params"][0]["name"]
    data["units"][0]["params"][0]["name"] = "renamed.weight"
    data["aliases"] = {}
    for group in data["optimizer"]["groups"]:
        group["params"] = ["renamed.weight" if name == previous else name for name in group["params"]]


def _reshape_parameter(data: dict[str, Any]) -> None:
    data["units"][1]["params"][0]["shape"] = [100, 1]


MASTER = "master-00001-of-00002.safetensors"
BUFFERS = "module-00001-of-00002.safetensors"
MOMENT = "optimizer.exp_avg-00001-of-00002.safetensors"
# name -> (what happens to the folder global_step2, what the message must contain)
DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "flipped bit in one rank's master": (lambda folder: _flip(folder / MASTER, -1), (MASTER, "damaged", "(rank 1)")),
    "flipped bit in a moment": (lambda folder: _flip(folder / MOMENT, -400), (MOMENT, "damaged")),
    "flipped bit in a header": (lambda folder: _flip(folder / MOMENT, 12), (MOMENT, "header")),
    "flipped bit in buffers": (lambda folder: _flip(folder / BUFFERS, -1), (BUFFERS, "damaged")),
    "flipped bit in the index": (lambda folder: _flip(folder / "index.json", 300), ("index.json", "damaged")),
    "truncated": (lambda folder: os.truncate(folder / MASTER, 500), (MASTER, "500 bytes", "truncated")),
    "missing file": (lambda folder: (folder / MOMENT).unlink(), (MOMENT, "is missing")),
    "missing marker": (lambda folder: (folder / "complete").unlink(), ("global_step2 is incomplete", "tag='global_step0'")),
    "missing folder": (shutil.rmtree, ("there is no checkpoint folder", "global_step2", "tag='global_step0'")),
    "file of another step": (
        lambda folder: shutil.copy(folder.parent / "global_step0" / MASTER, folder / MASTER) and None,
        (MASTER, "does not match the index"),
    ),
    "other version": (lambda folder: _edit_index(folder, lambda data: data.update(version=9)), ("index.json", "version 9")),
    "renamed parameter": (lambda folder: _edit_index(folder, _rename_parameter), ("lacks", "entry.weight", "renamed.weight")),
    "other shape": (lambda folder: _edit_index(folder, _reshape_parameter), ("shape (10, 10)", "(100, 1)", "frozen.weight")),
    "lost rates": (
        lambda folder: _edit_index(folder, lambda data: data["optimizer"]["groups"][1].update(values={})),
        ("optimizer.groups[1]", "no hyper-parameters"),
    ),
    "lost shard": (lambda folder: _edit_index(folder, lambda data: data["files"].pop(MASTER)), (MASTER, "lacks")),
}


@pytest.fixture(scope="module")
def said(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each rank says of each damage."""
    place = tmp_path_factory.mktemp("damage")
    for name, (damage, _) in DAMAGE.items():
        shutil.copytree(saved, place / name)
        damage(place / name / "global_step2")
    answers = ranks.run_ranks(_errors_of_loads, WORLD, [str(place / name) for name in DAMAGE], "global_step2")
    return {name: list(texts) for name, texts in zip(DAMAGE, zip(*answers, strict=True), strict=True)}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_alike_on_every_rank(said: dict[str, list[str]], name: str) -> None:
    first, second = said[name]
    assert first == second and first.startswith("CheckpointError: loading")
    for part in DAMAGE[name][1]:
        assert part in first, (part, first)


def _load_and_name(folder: str) -> str:
    engine = start(3, "bf16", seed=5)
    path = engine.load_checkpoint(folder)[0]
    engine.destroy()
    return str(path)


@pytest.mark.parametrize("name", ["missing marker", "missing folder"])
def test_without_a_tag_the_newest_complete_checkpoint_is_taken(saved: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    DAMAGE[name][0](folder / "global_step2")
    assert ranks.run_ranks(_load_and_name, WORLD, str(folder)) == [str(folder / "global_step0")] * WORLD


def test_tag_that_does_not_exist_is_an_error(saved: Path) -> None:
    (first,), (second,) = ranks.run_ranks(_errors_of_loads, WORLD, [str(saved)], "global_step7")
    assert first == second and "global_step7" in first and "'global_step2'" in first


def _nothing_changes_before_the_check(folders: list[str]) -> None:
    from hf_zero.errors import CheckpointError

    engine = start(3, "bf16", seed=5)
    for step, folder in enumerate(folders):
        steps(engine, step, 1, "bf16")
        before = full_state(engine)
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(folder)
        assert differences(full_state(engine), before) == [], folder
    steps(engine, 9, 1, "bf16")
    engine.destroy()


def test_a_checkpoint_that_does_not_fit_changes_nothing(saved: Path, tmp_path: Path) -> None:
    names = ("renamed parameter", "other shape", "truncated", "missing file", "lost shard")
    for name in names:
        shutil.copytree(saved, tmp_path / name)
        DAMAGE[name][0](tmp_path / name / "global_step2")
    ranks.run_ranks(_nothing_changes_before_the_check, WORLD, [str(tmp_path / name) for name in names])


# -- writing ----------------------------------------------------------------------------------------------------------------


def _disk_full(folder: str, failing_rank: int, stage: int) -> str:
    """One rank's disk fills during a save over the previous checkpoint of the same tag; the next save works again."""
    engine = start(stage, "bf16")
    engine.save_checkpoint(folder, "t")
    saved = full_state(engine)
    steps(engine, 0, 1, "bf16")
    with Slowly(fails=(failing_rank,)), pytest.raises(Exception) as caught:
        engine.save_checkpoint(folder, "t")
    assert ranks.rank() != 0 or sorted(os.listdir(folder)) == ["latest", "t", "zero_to_fp32.py"]  # rank 0 clears up
    engine.load_checkpoint(folder)
    assert differences(full_state(engine), saved) == []
    engine.save_checkpoint(folder, "t")
    engine.destroy()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.fast_rows("0-3")
@pytest.mark.parametrize(("failing_rank", "stage"), [(1, 0), (0, 3)])
def test_full_disk_is_named_on_every_rank_and_the_former_checkpoint_stays(tmp_path: Path, failing_rank: int, stage: int) -> None:
    answers = ranks.run_ranks(_disk_full, WORLD, str(tmp_path), failing_rank, stage)
    assert answers[0] == answers[1]
    for part in ("CheckpointError: saving checkpoint 't'", "No space left on device", "optimizer.exp_avg", f"(rank {failing_rank})"):
        assert part in answers[0], answers[0]


def _error_of_save(folder: str, tag: str) -> str:
    engine = start(1)
    with pytest.raises(Exception) as caught:
        engine.save_checkpoint(folder, tag)
    engine.destroy()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    answers = ranks.run_ranks(_error_of_save, WORLD, str(tmp_path / "file" / "run"), "t")
    assert answers[0] == answers[1] and str(tmp_path / "file") in answers[0] and answers[0].startswith("CheckpointError")
    answers = ranks.run_ranks(_error_of_save, WORLD, str(tmp_path), "../t")
    assert answers[0] == answers[1] and "'../t' cannot name a folder" in answers[0]


class WholeTensorState(torch.optim.SGD):
    """Keeps, beside its arithmetic, a state that is neither flat nor a number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["factors"] = torch.zeros(3, 2)


def _state_of_another_shape(folder: str) -> str:
    import hf_zero

    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    engine = hf_zero.initialize(model=model, optimizer=WholeTensorState(model.parameters(), lr=0.1), config=config)[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    with pytest.raises(Exception) as caught:
        engine.save_checkpoint(folder)
    engine.destroy()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_optimizer_state_that_cannot_be_divided_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    answers = ranks.run_ranks(_state_of_another_shape, WORLD, str(tmp_path / "new"))
    assert answers[0] == answers[1] and "CheckpointError" in answers[0] and "'factors'" in answers[0] and "(3, 2)" in answers[0]
    assert not (tmp_path / "new").exists()


def _a_rank_dies(folder: str) -> str:
    from hf_zero.checkpoint import save

    engine = start(3)
    engine.save_checkpoint(folder, "t")
    original = save.write_tensor_file

    def dying(path: Path, entries: Any, **options: Any) -> Any:
        if ranks.rank() == 1:
            os._exit(9)
        time.sleep(0.2)  # so that the others notice it where they wait
        return original(path, entries, **options)

    save.write_tensor_file = dying
    try:
        with pytest.raises(Exception) as caught:
            engine.save_checkpoint(folder, "u")
    finally:
        save.write_tensor_file = original
    return f"{type(caught.value).__name__}: {caught.value}"


def _load_after(folder: str) -> None:
    engine = start(3)
    assert engine.load_checkpoint(folder)[0] == str(Path(folder) / "t")
    engine.save_checkpoint(folder, "u")
    assert engine.load_checkpoint(folder)[0] == str(Path(folder) / "u")
    engine.destroy()


def test_death_of_a_rank_is_an_error_on_the_others_and_the_former_checkpoint_loads(tmp_path: Path) -> None:
    first, dead, third = ranks.observe_ranks(_a_rank_dies, 3, str(tmp_path), grace=60.0)
    assert dead.status == "died" and first.ok and third.ok, (first.text, dead.text, third.text)
    assert first.value == third.value and first.value.startswith(f"CheckpointError: saving checkpoint 'u' to {tmp_path}")
    assert "another rank died" in first.value
    assert not (tmp_path / "u").exists()
    ranks.run_ranks(_load_after, WORLD, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "t", "u", "zero_to_fp32.py"]


def _half_loaded(folder: str) -> None:
    from hf_zero.errors import StateError

    engine = start(3, "bf16")
    steps(engine, 0, 1, "bf16")
    engine.save_checkpoint(folder, "good")
    engine.save_checkpoint(folder, "damaged")
    good = full_state(engine)
    if ranks.rank() == 0:
        file = next(Path(folder, "damaged").glob("optimizer.exp_avg_sq-00001-*"))
        _flip(file, file.stat().st_size - 20)
    torch.distributed.barrier()
    steps(engine, 1, 2, "bf16")
    with pytest.raises(Exception, match="damaged"):
        engine.load_checkpoint(folder, "damaged")
    with pytest.raises(Exception, match="there is no checkpoint folder"):
        engine.load_checkpoint(folder, "absent")
    tried = (
        lambda: steps(engine, 2, 3, "bf16"),
        lambda: engine(torch.zeros(1)),
        lambda: engine.backward(torch.zeros(1)),
        engine.step,
        lambda: engine.save_checkpoint(folder, "more"),
        lambda: engine.save_16bit_model(folder),
        lambda: engine._consolidated_16bit_state_dict(),
    )
    for attempt in tried:
        with pytest.raises(StateError, match=f"after a load of {folder}/damaged that failed while it read values"):
            attempt()
    engine.load_checkpoint(folder, "good")
    assert differences(full_state(engine), good) == []
    steps(engine, 1, 2, "bf16")
    engine.destroy()


def test_an_engine_that_is_half_loaded_refuses_to_go_on_until_a_load_succeeds(tmp_path: Path) -> None:
    ranks.run_ranks(_half_loaded, WORLD, str(tmp_path))


# -- interrupts --------------------------------------------------------------------------------------------------------


def _interrupted(folder: str, place: str) -> list[str]:
    """Interrupt a save at a call of the function ``place``; return the entries of the folder after it, and after the next save."""
    engine = start(2, "fp32")
    engine.save_checkpoint(folder, tag="first")
    with mock.patch(place, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(folder, tag="second")
    found = sorted(os.listdir(folder))
    engine.save_checkpoint(folder, tag="second")
    found += sorted(os.listdir(folder))
    engine.destroy()
    return found


@pytest.mark.parametrize("place", ["checkpoint.files.disk.Disk.sync", "system.folder.Folder.move", "checkpoint.commit.staging.finalize"])
def test_an_interrupted_save_leaves_no_folder(tmp_path: Path, place: str) -> None:
    expected = ["first", "latest", "zero_to_fp32.py", "first", "latest", "second", "zero_to_fp32.py"]
    assert ranks.run_ranks(_interrupted, 1, str(tmp_path), f"hf_zero.{place}") == [expected]
