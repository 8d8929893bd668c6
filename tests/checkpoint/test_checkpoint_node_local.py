"""Checkpoints on disks that nodes have of their own. A node is a folder here: its ranks work in it and name the same relative path."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.errors import CheckpointError
from tests.support import ranks
from tests.support.checkpoints import differences, full_state, on_node, start, steps
from tests.support.rows import slow_but

LOCAL = {"checkpoint": {"use_node_local_storage": True}}


def _save_and_load(folder: str, stage: int) -> dict[str, Any]:
    with on_node(folder, 2):
        engine = start(stage, "bf16", **LOCAL)
        steps(engine, 0, 2, "bf16")
        engine.save_checkpoint("run", client_state={"rank": ranks.rank(), "state": torch.arange(3) + ranks.rank()})
        saved = full_state(engine)
        engine.destroy()
        engine = start(stage, "bf16", seed=5, **LOCAL)
        path, state = engine.load_checkpoint("run")
        assert path == "run/global_step2" and state is not None
        assert state["rank"] == ranks.rank() and state["state"].tolist() == [ranks.rank(), ranks.rank() + 1, ranks.rank() + 2]
        assert differences(full_state(engine), saved) == []
        engine.destroy()
        return saved


def _load_together(folder: str, stage: int, expected: dict[str, Any]) -> None:
    engine = start(stage, "bf16", seed=6)
    engine.load_checkpoint(folder)
    assert differences(full_state(engine), expected) == []
    engine.destroy()


@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
def test_every_node_keeps_its_part_and_all_parts_are_a_checkpoint(tmp_path: Path, stage: int) -> None:
    saved = ranks.run_ranks(_save_and_load, 4, str(tmp_path), stage)[0]
    nodes = [tmp_path / f"node{node}" / "run" / "global_step2" for node in range(2)]
    files = [{path.name for path in node.iterdir()} for node in nodes]
    both = {name for name in files[0] & files[1] if name.endswith(".safetensors")}
    assert both == {name for name in files[0] | files[1] if name.startswith("module-") or name == "values.safetensors"}
    assert "values.safetensors" in both and any(name.startswith("module-") for name in both)
    for name in {*both, "index.json", "complete"}:
        assert (nodes[0] / name).read_bytes() == (nodes[1] / name).read_bytes()
    masters = [sorted(name for name in found if name.startswith("master-")) for found in files]
    assert masters == [[f"master-{rank:05d}-of-00004.safetensors" for rank in pair] for pair in ((0, 1), (2, 3))]
    for node in nodes:
        assert sorted(path.name for path in node.parent.iterdir()) == ["global_step2", "latest", "zero_to_fp32.py"]
    shutil.copytree(nodes[0].parent, tmp_path / "together")
    shutil.copytree(nodes[1], tmp_path / "together" / "global_step2", dirs_exist_ok=True)
    ranks.run_ranks(_load_together, 1, str(tmp_path / "together"), stage, saved)


def _uneven(folder: str) -> list[str]:
    """What a kill between two nodes' renames leaves."""
    with on_node(folder, 1):
        engine = start(2, **LOCAL)
        engine.save_checkpoint("run")
        first = full_state(engine)
        steps(engine, 0, 1)
        engine.save_checkpoint("run")
        if ranks.rank() == 1:
            shutil.rmtree("run/global_step1")
        with pytest.raises(CheckpointError) as absent:
            engine.load_checkpoint("run", tag="global_step1")
        assert engine.load_checkpoint("run")[0] == "run/global_step0"
        assert differences(full_state(engine), first) == []

        # The same with one tag for all checkpoints: node 0 has replaced it, node 1 has not.
        engine.save_checkpoint("same", "t")
        shutil.copytree("same/t", "former")
        steps(engine, 0, 1)
        engine.save_checkpoint("same", "t")
        if ranks.rank() == 0:
            shutil.move("former", "same/.t.former")
        else:
            shutil.rmtree("same/t")
            shutil.move("former", "same/t")
        assert engine.load_checkpoint("same")[0] == ("same/.t.former" if ranks.rank() == 0 else "same/t")
        assert differences(full_state(engine), first) == []
        steps(engine, 0, 2)
        last = full_state(engine)
        engine.save_checkpoint("same", "t")
        steps(engine, 2, 1)
        assert engine.load_checkpoint("same")[0] == "same/t"
        assert differences(full_state(engine), last) == []
        assert sorted(os.listdir("same")) == ["latest", "t", "zero_to_fp32.py"]
        engine.destroy()
        return [str(absent.value)]


@pytest.mark.slow  # fast: test_checkpoint_faults.py has lost files
def test_a_checkpoint_that_not_every_node_has_gives_way(tmp_path: Path) -> None:
    # Each node loads a folder of its own name: labels differ, what is sent does not.
    answers = ranks.run_ranks(_uneven, 2, str(tmp_path), ordered=False)
    assert answers[0] == answers[1]
    assert "no checkpoint 'global_step1' that is complete on every node" in answers[0][0] and "(rank 1) has none" in answers[0][0]


def _elsewhere(folder: str) -> list[str]:
    found = []
    with on_node(folder, 1):
        engine = start(3, **LOCAL)
        engine.save_checkpoint("run")
    with on_node(folder, 1, turned=True), pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint("run")
    found.append(str(caught.value))
    with on_node(folder, 1):
        if ranks.rank() == 1:
            next(Path("run/global_step0").glob("master-*")).unlink()
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint("run")
        found.append(str(caught.value))
        if ranks.rank() == 1:
            Path("run").rename("away")
            Path("run").write_text("a file")
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint("run", "next")
        found.append(str(caught.value))
        assert ranks.rank() == 1 or not list(Path("run").glob("*next*"))
        assert engine.load_checkpoint("absent") == (None, None)
    engine.destroy()
    return found


def test_a_part_that_is_not_there_is_named_on_every_rank(tmp_path: Path) -> None:
    answers = ranks.run_ranks(_elsewhere, 2, str(tmp_path))
    assert answers[0] == answers[1]
    turned, lost, blocked = answers[0]
    assert "master-00000-of-00002.safetensors" in turned and "which another node wrote" in turned
    assert "lacks master-00001-of-00002.safetensors" in lost and "(rank 1)" in lost
    assert "(rank 1)" in blocked and "run" in blocked


def _one_disk(folder: str, load: bool) -> None:
    os.environ["LOCAL_RANK"], local = "0", os.environ["LOCAL_RANK"]
    try:
        engine = start(2, **LOCAL)
        if not load:
            steps(engine, 0, 1, same_on_all=True)
            engine.save_checkpoint(folder)
            engine.save_checkpoint(folder)  # over itself
        assert engine.load_checkpoint(folder)[0] == f"{folder}/global_step1" and engine.global_steps == 1
        engine.destroy()
    finally:
        os.environ["LOCAL_RANK"] = local


def test_nodes_that_share_a_disk_write_one_checkpoint(tmp_path: Path) -> None:
    ranks.run_ranks(_one_disk, 2, str(tmp_path), False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest", "zero_to_fp32.py"]
    ranks.run_ranks(_one_disk, 1, str(tmp_path), True)
