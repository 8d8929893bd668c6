"""Nothing is written or deleted through a link: links, second names, exchanged folders and other capitals against all that writes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hf_zero.checkpoint.commit import folders, staging
from hf_zero.checkpoint.convert.run import Conversion, convert
from hf_zero.checkpoint.model.model_files import ModelFiles, PlannedTensor
from hf_zero.checkpoint.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from hf_zero.config.resolve import resolve
from hf_zero.deepspeed.served.logs import print_json_dist
from hf_zero.deepspeed.served.state_files import main as to_universal
from hf_zero.errors import CheckpointError, ConfigError, HfZeroError
from hf_zero.metrics import build_sinks
from hf_zero.plan.written import write_files
from hf_zero.profiling.overlap import draw, overlap_of, write_trace
from hf_zero.profiling.recordings import Event, RecordedStep, Recording
from hf_zero.profiling.report import write_report
from hf_zero.system import own_files, pictures
from hf_zero.system.folder import Folder
from hf_zero.tensor_parallel.plan import TpPlan
from tests.support.processes import REPO

GOLDEN = REPO / "tests" / "golden" / "checkpoint_v1_adamw"
OURS = "as it was"


def _zero_to_fp32(*names: str, **options: object) -> Callable[[Path], None]:
    return lambda target: convert_zero_checkpoint_to_fp32_state_dict(GOLDEN, target.joinpath(*names), **options)  # type: ignore[arg-type]


def _convert(to: str) -> Callable[[Path], None]:
    def work(target: Path) -> None:
        convert(Conversion(GOLDEN, target, to=to, quiet=True, max_shard_bytes=500))

    return work


def _model_files(target: Path) -> None:
    tensors = [PlannedTensor(name, torch.float32, (4,)) for name in ("a", "b")]
    files = ModelFiles(target, "model.safetensors", tensors, 16)
    try:
        for tensor in tensors:
            files.write(tensor.name, torch.ones(4))
        files.commit()
    except BaseException:
        files.abort()
        raise


def _events() -> list[Event]:
    return [Event("hf_zero::phase forward", "user_annotation", (1, 1), 0, 9), Event("aten::mm", "cpu_op", (1, 1), 1, 3)]


def _trace(target: Path) -> None:
    found = [overlap_of(Recording(0, _events()))]
    write_trace(found, target / "overlap.json")
    draw(found, target / "overlap.png")


def _picture(target: Path) -> None:
    figure, _ = pictures.canvas(1, (2, 2), "--plot")
    pictures.save(figure, target / "plan.png", "--plot")


def _monitor(target: Path) -> None:
    (sink,) = build_sinks(resolve({"csv_monitor": {"enabled": True, "output_path": str(target), "job_name": "."}}).config)
    try:
        sink.write({"Train/loss": 1.0}, 1)
    finally:
        sink.close()


def _recorded(target: Path) -> None:
    step = RecordedStep(target, 0, 0, torch.device("cpu"))
    for phase in ("forward", "step"):
        with step.phase(phase):
            torch.ones(2) + 1


def _checkpoint(target: Path) -> None:
    folder = staging.begin(target, "t")
    try:
        staging.finalize(folder, "{}")
        staging.publish(folder, target, "t")
    except BaseException:
        staging.abandon(folder)
        raise
    staging.write_script(target)
    own_files.write_text(target / "latest", "t")


WRITERS: dict[str, Callable[[Path], object]] = {
    "zero_to_fp32": _zero_to_fp32(max_shard_size=None),
    "zero_to_fp32 in parts": _zero_to_fp32(max_shard_size="1KB"),
    "zero_to_fp32 by torch": _zero_to_fp32(safe_serialization=False, max_shard_size="1KB"),
    "zero_to_fp32 to a file": _zero_to_fp32("out.bin"),
    "convert --to hf": _convert("hf"),
    "convert --to dcp": _convert("dcp"),
    "convert --to hf_zero": _convert("hf_zero"),
    "ds_to_universal": lambda target: to_universal(
        type("Arguments", (), {"input_folder": str(GOLDEN / "golden"), "output_folder": str(target / "u")})
    ),
    "save_16bit_model": _model_files,
    "save_checkpoint": _checkpoint,
    "trace": _trace,
    "plan --plot": _picture,
    "plan --write": lambda target: write_files(target, {"a": 1}, {"b": 2}),
    "explain --save-plan": lambda target: TpPlan(2).save(target / "plan.json"),
    "csv_monitor": _monitor,
    "trace_folder": _recorded,
    "flops_profiler": lambda target: write_report("text", str(target / "profile.txt")),
    "print_json_dist": lambda target: print_json_dist({"a": 1}, [0], target / "told.json"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """The names that each of them leaves in an empty folder: files, and folders of checkpoints."""
    found = {}
    for name, write in WRITERS.items():
        folder = tmp_path_factory.mktemp("clean")
        write(folder)
        found[name] = sorted(path.name for path in folder.iterdir())
        assert found[name] and not [left for left in found[name] if left.startswith(".") and left != ".metadata"], found[name]
    return found  # type: ignore[return-value]


PLANTS: dict[str, Callable[[Path, Path, Path], object]] = {
    "link to a file": lambda place, file, folder: place.symlink_to(file),
    "link to a folder": lambda place, file, folder: place.symlink_to(folder),
    "link to nothing": lambda place, file, folder: place.symlink_to(folder / "new"),
    "second name": lambda place, file, folder: os.link(file, place),
    "other capitals": lambda place, file, folder: place.with_name(place.name.swapcase()).write_text(OURS),
    "pipe": lambda place, file, folder: os.mkfifo(place),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("writer", WRITERS)
def test_what_lies_elsewhere_stays_as_it_is(writer: str, plant: str, written: dict[str, list[str]], tmp_path: Path) -> None:
    """Whether the command replaces the link or refuses it by name."""
    target, file, folder = tmp_path / "target", tmp_path / "file", tmp_path / "folder"
    for made in (target, folder):
        made.mkdir()
    (folder / "inside").write_text(OURS)
    file.write_text(OURS)
    if writer == "zero_to_fp32 to a file" and plant == "link to a folder":
        pytest.skip("the user names that folder")
    for name in written[writer]:
        PLANTS[plant](target / name, file, folder)
    try:
        WRITERS[writer](target)
    except (HfZeroError, OSError) as error:
        assert str(target) in str(error) or str(target).removeprefix(str(tmp_path)) in str(error), error
    assert file.read_text() == OURS and [path.name for path in folder.iterdir()] == ["inside"], "written through a link"
    assert (folder / "inside").read_text() == OURS
    assert {path.name for path in tmp_path.iterdir()} == {"target", "file", "folder"}
    if plant == "other capitals":
        assert all((target / name.swapcase()).read_text() == OURS for name in written[writer] if name != name.swapcase())
    hidden = [path.name for path in target.iterdir() if path.name.endswith(".part")]
    assert not hidden, "something of a refused write was left"


def test_a_planted_link_is_replaced_by_what_is_written(tmp_path: Path) -> None:
    """The case of the checkpoint folder that chose the bytes and the file they went to."""
    folder, file = tmp_path / "checkpoint", tmp_path / "file"
    shutil.copytree(GOLDEN, folder)
    file.write_text(OURS)
    (folder / "pytorch_model.bin").symlink_to(file)
    convert_zero_checkpoint_to_fp32_state_dict(folder, folder, safe_serialization=False)
    assert file.read_text() == OURS and not (folder / "pytorch_model.bin").is_symlink()
    assert torch.load(folder / "pytorch_model.bin", weights_only=True)


def test_a_distributed_checkpoint_is_written_into_an_empty_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_text(OURS)
    with pytest.raises(CheckpointError, match="is not empty .*choose another folder"):
        _convert("dcp")(tmp_path)
    assert (tmp_path / "__0_0.distcp").read_text() == OURS


@pytest.mark.parametrize("kind", ["csv_monitor", "tensorboard"])
def test_the_folder_of_a_monitor_is_no_link(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "job").symlink_to(outside)
    for job in ("job", "job/deeper"):
        with pytest.raises(ConfigError, match=f"`{kind}`: the folder .*runs/job.* cannot be used"):
            build_sinks(resolve({kind: {"enabled": True, "output_path": str(tmp_path / "runs"), "job_name": job}}).config)
    assert not list(outside.iterdir())
    (tmp_path / "named").symlink_to(outside)  # this one the user names
    for sink in build_sinks(resolve({kind: {"enabled": True, "output_path": str(tmp_path / "named"), "job_name": "job"}}).config):
        sink.close()
    assert [path.name for path in outside.iterdir()] == ["job"]


def test_records_whose_files_would_have_one_name_have_files_of_their_own(tmp_path: Path) -> None:
    (sink,) = build_sinks(resolve({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}).config)
    for _ in range(2):
        sink.write({"Train/loss": 1.0, "train/Loss": 2.0, "Train_loss": 3.0}, 1)
    sink.close()
    heads = {path.name: path.read_text().splitlines()[0] for path in (tmp_path / "job").iterdir()}
    assert heads == {"Train_loss.csv": "step,loss", "train_Loss-2.csv": "step,Loss", "Train_loss-3.csv": "step,Train_loss"}


def test_a_recording_that_cannot_be_written_ends_no_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from hf_zero.observe import logger

    (tmp_path / "rank0.json").mkdir()
    logger.addHandler(caplog.handler)
    try:
        _recorded(tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
    assert "the recording of the step is lost" in caplog.text and [path.name for path in tmp_path.iterdir()] == ["rank0.json"]


# -- folders that are exchanged while something is at work in them --------------------------------------------------------


def exchanged(folder: Path, outside: Path) -> None:
    """Another process puts a link to ``outside`` in the place of ``folder``."""
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(outside)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with files under names that the package deletes in folders of its own."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("optimizer.bin", "in_use", "pytorch_model.bin", own_files.WRITER_FILE, "model.safetensors"):
        (folder / name).write_text(OURS)
    return folder


def untouched(outside: Path) -> bool:
    return len(list(outside.iterdir())) == 5 and all(path.read_text() == OURS for path in outside.iterdir())


def test_a_folder_that_is_exchanged_before_files_are_deleted(tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hf_zero_swap_x"
    folder.mkdir()
    (folder / "optimizer.bin").write_text("")
    names = Folder.names

    def late(opened: Folder) -> list[str]:
        found = names(opened)
        if opened.path == folder and not folder.is_symlink():
            exchanged(folder, outside)
        return found

    monkeypatch.setattr(Folder, "names", late)
    assert not own_files.remove_folder(folder, lambda name: True)
    assert untouched(outside) and not list((tmp_path / "moved").iterdir()) and folder.is_symlink()


def test_a_link_in_the_place_of_a_swap_folder_is_left_alone(tmp_path: Path, outside: Path) -> None:
    from hf_zero.offload.files import SwapFolder

    swap = tmp_path / "swap"
    swap.mkdir()
    (swap / f"hf_zero_swap_{os.uname().nodename}_x").symlink_to(outside)
    SwapFolder(swap, 0).remove()
    assert untouched(outside) and len(list(swap.iterdir())) == 1


def test_swap_folders_lose_files_of_swap_names_alone(tmp_path: Path) -> None:
    from hf_zero.offload.files import FILES, SwapFolder

    folder = tmp_path / f"hf_zero_swap_{os.uname().nodename}_x"
    folder.mkdir()
    for name in ("in_use", "pytorch_model.bin", "OPTIMIZER.BIN", *FILES):
        (folder / name).write_text(OURS)
    SwapFolder(tmp_path, 0).remove()
    assert sorted(path.name for path in folder.iterdir()) == ["OPTIMIZER.BIN", "pytorch_model.bin"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_another_user_owns_is_not_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "optimizer.bin").write_text(OURS)
    os.chown(folder, 12345, 12345)
    assert not own_files.remove_folder(folder, lambda name: True) and (folder / "optimizer.bin").exists()
    checkpoint = staging.begin(tmp_path, "t")
    staging.finalize(checkpoint, "{}")
    os.chown(staging.publish(checkpoint, tmp_path, "t"), 12345, 12345)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        staging.begin(tmp_path, "t")


def test_owners_that_a_network_drive_makes_up_are_learnt_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every new file belongs to nobody, as on a drive that trusts no root, own folders are deleted all the same."""
    folder = tmp_path / "folder"
    folder.mkdir()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert own_files.remove_folder(folder, lambda name: True) and not list(tmp_path.iterdir())


def test_a_folder_that_is_exchanged_while_a_file_is_written(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with own_files.replacing(folder / "model.safetensors") as file:
        exchanged(folder, outside)
        file.write(b"new")
    assert untouched(outside) and (tmp_path / "moved" / "model.safetensors").read_bytes() == b"new"


def test_a_folder_that_is_exchanged_while_a_library_writes(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with own_files.for_library(folder) as inside:
        exchanged(folder, outside)
        (inside / "model.safetensors").write_bytes(b"new")
    assert untouched(outside) and [path.name for path in (tmp_path / "moved").iterdir()] == ["model.safetensors"]


def test_a_folder_that_is_exchanged_while_a_model_is_written(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "folder"
    files = ModelFiles(folder, "model.safetensors", [PlannedTensor("a", torch.float32, (4,))], 1 << 20)
    exchanged(folder, outside)
    files.write("a", torch.ones(4))
    files.commit()
    assert untouched(outside) and [path.name for path in (tmp_path / "moved").iterdir()] == ["model.safetensors"]


def test_a_hidden_folder_of_a_save_that_is_exchanged(tmp_path: Path, outside: Path) -> None:
    folder = staging.begin(tmp_path, "t")
    exchanged(folder, outside)
    with pytest.raises((CheckpointError, OSError)):
        staging.finalize(folder, "{}")
    staging.abandon(folder)
    assert untouched(outside)


# -- capitals -------------------------------------------------------------------------------------------------------------


def test_a_disk_without_capitals_replaces_nothing_of_another_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latest").write_text(OURS)
    monkeypatch.setattr(Folder, "names", lambda folder: [name.upper() for name in os.listdir(folder.descriptor)])
    for work in (
        lambda: own_files.write_text(tmp_path / "latest", "new"),
        lambda: os.close(Folder(tmp_path).append("latest")),
    ):
        with pytest.raises(OSError, match="under a name with other capitals"):
            work()
    own_files.remove_file(tmp_path / "latest")
    (tmp_path / "t").mkdir()
    with pytest.raises(CheckpointError, match="differs only in upper and lower case"):
        staging.clear(tmp_path, "t")
    assert (tmp_path / "latest").read_text() == OURS


def test_tags_that_are_names_of_files_but_for_capitals() -> None:
    for tag in ("latest", "LATEST", "Zero_To_FP32.py", "x" * 201, "é" * 101):
        with pytest.raises(CheckpointError, match="the checkpoint tag"):
            folders.check_tag(tag)


def test_companions_whose_names_differ_in_capitals_are_copied_once(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    shutil.copytree(GOLDEN, source / "c")
    for name in ("vocab.txt", "vocab.TXT"):
        (source / "c" / name).write_text(name)
    convert(Conversion(source / "c", target, to="hf", quiet=True))
    assert [path.name for path in target.iterdir() if path.name.startswith("vocab")] == ["vocab.TXT"]


# -- what must not be replaced --------------------------------------------------------------------------------------------


def test_devices_and_folders_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/null"), Path("/dev/stdout"), tmp_path / "folder", tmp_path / "pipe"):
        with pytest.raises(OSError, match="device|no file"):
            own_files.write_text(path, "new")
    assert Path("/dev/null").is_char_device()


def test_a_file_that_is_replaced_hands_on_who_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_text(OURS)
    path.chmod(0o600)
    own_files.write_text(path, "new")
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_killed_library_left_goes_with_the_next_write(tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), own_files.for_library(tmp_path) as inside:
        (inside / "half").write_text("")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_copies_keep_holes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.write(b"begin")
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"middle")
    own_files.copy_file(source, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size == 64 << 20 and (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert (tmp_path / "copy").stat().st_blocks * 512 < 32 << 20


def test_weights_are_not_read_through_a_link_to_elsewhere(tmp_path: Path) -> None:
    """Else the folder would choose which file of the machine ends up in what is given away."""
    from safetensors.torch import save_file

    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere.safetensors"
    model.mkdir()
    save_file({"a": torch.ones(4)}, elsewhere)
    (model / "model.safetensors").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="is a link to .*elsewhere.safetensors, outside of its folder"):
        convert(Conversion(model, tmp_path / "target", quiet=True))
    blobs = tmp_path / "models--a" / "blobs"
    snapshot = tmp_path / "models--a" / "snapshots" / "1"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    elsewhere.rename(blobs / "b")
    (snapshot / "model.safetensors").symlink_to(blobs / "b")  # as a cache of the Hub keeps it
    assert "checkpoint" in convert(Conversion(snapshot, tmp_path / "target", quiet=True))


def test_a_plan_is_never_written_over_a_link(tmp_path: Path) -> None:
    (tmp_path / "ds.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="exists already"):
        write_files(tmp_path, json.loads("{}"), None)
