"""Checkpoints in object stores: the same files and outcomes as in a folder, invisible until the last write, whatever the store refuses."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.errors import CheckpointError
from hf_zero.system.parted_upload import PartPool
from tests.support import ranks
from tests.support.checkpoints import IN_BACKGROUND, differences, full_state, start, steps
from tests.support.processes import REPO, run
from tests.support.stores import Fault, Faulty, faulty, objects, race


def _records(folder: Path) -> dict[str, Any]:
    index = json.loads((folder / "index.json").read_text())
    return {name: (index[name] if name != "tag" else None) for name in index}


def _save_both(folder: str) -> tuple[str, dict[str, Any]]:
    """Saves to a folder and to a store, twice under one tag; returns the store's URL and the last state."""
    url = f"file://{folder}/store"
    engine = start(3, "bf16")
    assert engine.load_checkpoint(url) == (None, None)
    steps(engine, 0, 1, "bf16")
    engine.save_checkpoint(url, client_state={"rank": ranks.rank()})
    engine.save_checkpoint(f"{folder}/disk", client_state={"rank": ranks.rank()})
    saved = full_state(engine)
    for step in (1, 2):
        steps(engine, step, 1, "bf16")
        engine.save_checkpoint(url, "again")
    third = full_state(engine)
    path, client = engine.load_checkpoint(url, "global_step1")
    assert differences(full_state(engine), saved) == [] and client == {"rank": ranks.rank()}
    assert path.startswith(f"{url}/global_step1/")
    assert engine.load_checkpoint(url)[1] == {} and differences(full_state(engine), third) == []
    with pytest.raises(CheckpointError, match="newest complete one is 'again'"):
        engine.load_checkpoint(url, "global_step9")
    engine.destroy()
    return url, third


def _load(url: str, expected: dict[str, Any]) -> None:
    engine = start(1, "bf16", seed=1)
    engine.load_checkpoint(url)
    found = full_state(engine)
    assert differences({name: found[name] for name in expected}, expected) == []
    engine.destroy()


def test_a_store_holds_what_a_folder_holds(tmp_path: Path) -> None:
    url, third = ranks.run_ranks(_save_both, 2, str(tmp_path))[0]
    store, disk = tmp_path / "store", tmp_path / "disk" / "global_step1"
    names = [name for name in objects(store) if "/" not in name]
    assert names == ["latest", "zero_to_fp32.py"]
    inner = [path for path in (store / "global_step1").iterdir() if path.is_dir()]
    assert len(inner) == 1 and _records(inner[0]) == _records(disk)  # checksums of all chunks among them
    assert {path.name for path in inner[0].iterdir()} == {path.name for path in disk.iterdir()}
    assert len(list((store / "again").glob("*/index.json"))) == 1, "the save that was replaced is deleted"
    expected = {name: value for name, value in third.items() if name.startswith(("weight", "master", "exp_avg", "step"))}
    ranks.run_ranks(_load, 1, url, expected)
    shutil.copytree(store, tmp_path / "copied")
    ranks.run_ranks(_load, 1, str(tmp_path / "copied"), expected)  # a copy of the whole run is a folder of checkpoints


def test_weights_come_out_of_a_store(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from hf_zero.checkpoint.convert.run import Conversion, convert
    from hf_zero.checkpoint.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as to_fp32
    from hf_zero.system.object_store import place_of

    url, _ = ranks.run_ranks(_save_both, 1, str(tmp_path))[0]
    to_fp32(url, tmp_path / "a")
    to_fp32(tmp_path / "store", tmp_path / "b")  # the same files as a folder
    convert(Conversion(place_of(url), tmp_path / "c", quiet=True))
    copy = place_of(f"memory://{tmp_path.name}/run")
    convert(Conversion(place_of(f"{url}/again"), copy, to="hf_zero", tag="t", quiet=True))
    to_fp32(f"memory://{tmp_path.name}/run", tmp_path / "d")
    expected = load_file(tmp_path / "a" / "model.safetensors")
    for other in "bcd":
        found = load_file(tmp_path / other / "model.safetensors")
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found), other
    with pytest.raises(CheckpointError, match="only --to hf_zero writes into an object store"):
        convert(Conversion(place_of(url), copy, to="hf", quiet=True))


def _fails(work: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        work()
    return str(caught.value)


def _refused(folder: str) -> list[str]:
    """Saves and loads in a store that refuses; returns the errors of this rank."""
    place, texts = Path(folder), []
    engine = start(3, "bf16", **IN_BACKGROUND)
    steps(engine, 0, 1, "bf16")
    passing = [Fault(operation, times=2) for operation in ("info", "ls", "put", "write", "close", "delete")]
    lost = FileNotFoundError(2, "NoSuchUpload")  # the completion of an upload was carried out, its answer lost, the request repeated
    passing.append(Fault("close", "optimizer.exp_avg_sq", 1, error=lost))
    with faulty(place, *passing, Fault("put", "global_step1/complete", 1, late=True)) as url:
        engine.save_checkpoint(url)
        engine.wait_for_checkpoint()
        assert not any(fault.times for fault in passing if fault.operation in ("put", "write", "close")) or ranks.rank()
    saved, before = full_state(engine), objects(place)
    steps(engine, 1, 1, "bf16")
    with faulty(place, Fault("close", "exp_avg-00001", error=OSError(5, "500 of ftp://me:pw@host/x"))) as url:
        engine.save_checkpoint(url)  # in the background, so nothing is known yet
        texts.append(_fails(engine.wait_for_checkpoint))
        texts.append(_fails(lambda: (engine.save_checkpoint(url), engine.wait_for_checkpoint())))
        if ranks.rank() == 0:
            left = {name for name in objects(place) if name not in before}
            assert all(name.startswith(".saves/") for name in left), left
    with faulty(place, Fault("read", "master-00001")) as url:
        texts.append(_fails(lambda: engine.load_checkpoint(url)))
    with faulty(place, Fault("read", times=3)) as url:
        engine.load_checkpoint(url)
        assert differences(full_state(engine), saved) == []
        own = {path.rpartition("/")[2] for operation, path in Faulty.seen if operation == "read" and "master" in path}
        assert own == {f"master-0000{ranks.rank()}-of-00002.safetensors"}, "each rank reads its own part"
        steps(engine, 1, 1, "bf16")
        engine.save_checkpoint(url)
        engine.wait_for_checkpoint()
    engine.destroy()
    return texts


def test_a_store_that_refuses_ends_a_save_on_all_ranks_or_nowhere(tmp_path: Path) -> None:
    first, second = ranks.run_ranks(_refused, 2, str(tmp_path))
    assert first == second
    for text in first[:2]:
        assert "saving checkpoint 'global_step2' to faulty://" in text and "8 times: " in text and "(rank 1)" in text, text
        assert "exp_avg-00001" in text and "ftp://***@host/x" in text and "me:pw" not in text
    assert "master-00001" in first[2] and "503 Slow Down" in first[2]
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert not list((tmp_path / ".saves").iterdir()), "the failed saves are cleaned up by the next"
    assert len([path for path in (tmp_path / "global_step2").iterdir() if path.is_dir()]) == 1


def test_waits_double_and_what_cannot_pass_is_not_repeated(tmp_path: Path) -> None:
    from hf_zero.system.object_store import TRIES, place_of

    waits: list[float] = []
    with faulty(tmp_path, Fault("put", "x"), waits=waits) as url:
        place = place_of(url)
        with pytest.raises(OSError, match=f"{TRIES} times: .*503"):
            (place / "x").put(b"1")
    assert len(waits) == TRIES - 1
    assert all(later > 1.1 * sooner for sooner, later in zip(waits, waits[1:], strict=False)), waits
    waits.clear()
    denied = PermissionError(13, "no")
    with faulty(tmp_path, Fault("put", "x", error=denied), Fault("read", error=denied), waits=waits):
        for work in (lambda: (place / "x").put(b"1"), lambda: (place / "x").get_range(0, 1)):
            with pytest.raises(PermissionError, match="the store denies access"):
                work()
    assert not waits
    with faulty(tmp_path, Fault("put", "new", 1, late=True), waits=waits):
        (place / "new").put_new(b"mine")  # carried out, and its answer lost
        with pytest.raises(FileExistsError):
            (place / "new").put_new(b"another's")
    assert len(waits) == 1 and (tmp_path / "new").read_bytes() == b"mine"
    with faulty(tmp_path, Fault("put", "new", 1, late=True)):
        (place / "new").replace_object(b"later", b"mine")
        with pytest.raises(FileExistsError, match="it has other content"):
            (place / "new").replace_object(b"last", b"mine")
    assert (tmp_path / "new").read_bytes() == b"later"
    race(f"file://{tmp_path}/race")


def test_an_upload_that_breaks_off_is_not_completed_later(tmp_path: Path) -> None:
    import gc

    with faulty(tmp_path, Fault("write", "x", error=MemoryError())) as url:
        from hf_zero.system.object_store import place_of

        with pytest.raises(MemoryError), PartPool() as pool, (place_of(url) / "x").writing(10, pool) as file:
            file.write(b"12345")
        del file
        gc.collect()
    assert not (tmp_path / "x").exists()


def test_what_killed_saves_left_is_found_by_their_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from hf_zero.checkpoint.commit.store_saves import StoreSave
    from hf_zero.checkpoint.format.names import MASTER, average_kind, average_tensors_kind, shard_file
    from hf_zero.system.object_store import ObjectPath, place_of
    from hf_zero.system.process import Process

    place = place_of(f"file://{tmp_path}")
    assert isinstance(place, ObjectPath)
    dead = Process(Process.own().place, 1 << 21, "gone").as_json()
    elsewhere = {**dead, "place": "another machine"}
    parent = {**Process.own().as_json(), "pid": os.getppid(), "started": ""}  # it lives

    names = [shard_file(kind, 0, 1) for kind in (MASTER, average_kind("ema"), average_tensors_kind("ema"))]

    def leave(number: str, tag: str, writer: dict[str, Any], *ranks: str) -> None:
        (tmp_path / tag / number).mkdir(parents=True)
        for name in (*names, "notes.txt"):
            (tmp_path / tag / number / name).write_bytes(b"x")
        (tmp_path / ".saves").mkdir(exist_ok=True)
        for rank in ranks or ("",):
            (tmp_path / ".saves" / f"{number}{rank}.json").write_text(json.dumps({**writer, "tag": tag, "replaces": None}))

    leave("00000001", "t", dead)
    leave("00000004", "t", dead, "-1", "-12")  # killed before rank 0 left its record
    leave("00000005", "t", dead, "", "-1")
    leave("00000002", "u", elsewhere)
    leave("00000003", "u", parent)
    (tmp_path / ".saves" / "0000000g.json").write_text("{}")
    StoreSave(place, "t", "00000009").begin()
    assert objects(tmp_path) == [
        *(".saves/00000002.json", ".saves/00000003.json", ".saves/00000009.json", ".saves/0000000g.json"),
        *(f"t/{number}/notes.txt" for number in ("00000001", "00000004", "00000005")),
        *(f"u/{number}/{name}" for number in ("00000002", "00000003") for name in sorted((*names, "notes.txt"))),
    ]
    with pytest.raises(CheckpointError, match="is still running and is saving checkpoint 'u'"):
        StoreSave(place, "u", "0000000a").begin()
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "complete").write_text("not ours")
    with pytest.raises(CheckpointError, match="is not a file that hf_zero wrote"):
        StoreSave(place, "v", "0000000b").begin()


def test_an_url_is_refused_where_it_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero.system.object_store import place_of
    from hf_zero.system.own_files import make_folders
    from hf_zero.utils import newest_trainer_checkpoint

    with pytest.raises(CheckpointError, match="give the URL as a string"):
        place_of(Path("s3://bucket/run"))
    with pytest.raises(CheckpointError, match="only checkpoints are written to object stores"):
        make_folders(Path("s3://bucket/run"))
    with pytest.raises(CheckpointError, match="output_dir is a URL"):
        newest_trainer_checkpoint("s3://bucket/run")
    with pytest.raises(CheckpointError, match=r"sftp://\*\*\*@host/x (needs|cannot)"):
        place_of("sftp://me:secret@host/x")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(CheckpointError, match=r"^s3://\*\*\*@bucket/run needs fsspec: pip install 'hf_zero\[stores\]'$"):
        place_of("s3://me:secret@bucket/run")


_ENDS_FIRST = """
    import threading, time
    import torch, hf_zero
    from hf_zero.checkpoint.commit.store_saves import StoreSave

    files = StoreSave.files

    def after_the_script(self, *words):
        while threading.current_thread() is not threading.main_thread() and not threading._SHUTTING_DOWN:
            time.sleep(0.01)
        return files(self, *words)

    StoreSave.files = after_the_script
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"writer": {"decoupled": True}}}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    engine.save_checkpoint("URL", "t")
    print("script ends")
"""


@pytest.mark.slow  # fast: test_exit_status.py, test_checkpoint_background.py
def test_a_script_may_end_before_its_save_is_in_the_store(tmp_path: Path) -> None:
    """No pool of threads takes work once the interpreter ends, and every request to a store needs one."""
    code = textwrap.dedent(_ENDS_FIRST.replace("URL", f"file://{tmp_path}/store"))
    told = run([sys.executable, "-c", code], env={"PYTHONPATH": str(REPO)})
    assert "script ends" in told
    assert {"latest", "t/complete"} <= set(objects(tmp_path / "store"))
