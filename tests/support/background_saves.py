"""Training that continues while a checkpoint is written: the ways to request it, and the run that checks it."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from tests.support import ranks
from tests.support.checkpoints import IN_BACKGROUND, differences, full_state, start, steps


class Slowly:
    """Context in which every file of a save takes a while, or fails, on some ranks."""

    def __init__(self, seconds: float = 0.0, fails: tuple[int, ...] = ()) -> None:
        self.seconds, self.fails = seconds, fails

    def __enter__(self) -> None:
        from hf_zero.checkpoint import save

        self.original = save.write_tensor_file

        def write(path: Path, entries: Any, **options: Any) -> Any:
            time.sleep(self.seconds)
            if ranks.rank() in self.fails and "exp_avg" in path.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return self.original(path, entries, **options)

        save.write_tensor_file = write  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        from hf_zero.checkpoint import save

        save.write_tensor_file = self.original


def check_background_save(folder: str, stage: int, extra: dict[str, Any]) -> None:
    engine = start(stage, "bf16", **extra)
    steps(engine, 0, 2, "bf16")
    saved = full_state(engine)
    with Slowly(0.05):
        engine.save_checkpoint(folder, client_state={"x": torch.ones(2)})
        assert not (Path(folder) / "global_step2" / "complete").exists()
        expected = steps(engine, 2, 2, "bf16")  # trains while the checkpoint is written
        third = full_state(engine)
        engine.save_checkpoint(folder)  # waits for the first save
        assert (Path(folder) / "global_step2" / "complete").exists()
        engine.wait_for_checkpoint()
    assert (Path(folder) / "latest").read_text() == "global_step4"
    engine.load_checkpoint(folder, "global_step2")
    assert differences(full_state(engine), saved) == []
    assert steps(engine, 2, 2, "bf16") == expected
    engine.load_checkpoint(folder)
    assert differences(full_state(engine), third) == []
    if ranks.rank() == 0:
        assert sorted(path.name for path in Path(folder).iterdir()) == ["global_step2", "global_step4", "latest", "zero_to_fp32.py"]
        names = {path.name for path in (Path(folder) / "global_step2").iterdir()}
        index = json.loads((Path(folder) / "global_step2" / "index.json").read_text())
        assert names == {"complete", "index.json", *index["files"]}
    engine.destroy()


CONFIGS = {
    "writer": (3, IN_BACKGROUND),
    "datastates": (1, {"datastates_ckpt": True}),
    "no room": (2, {"datastates_ckpt": {"host_cache_size": 0}}),
    "room for some": (0, {"datastates_ckpt": {"host_cache_size": 2e-6}}),  # 2 KiB
}
