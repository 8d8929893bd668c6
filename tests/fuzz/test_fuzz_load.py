"""Changed indexes loaded into an engine: refused, or the same run as before."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.checkpoint.make_golden_checkpoint import FOLDERS
from tests.fuzz.mutations import mutate_value
from tests.support import ranks
from tests.support.checkpoints import differences, full_state, start, write_index

# What is the caller's, a name, or a number that a run might have had.
FREE = re.compile(
    r"library|tag|stage|client_state.*|extra_state.*|excluded.*|aliases.*|optimizer/name|units/\d+/dtype|counters.*|optimizer"
    r"|optimizer/groups/\d+/values(/(lr|foreach|fused|capturable|weight_decay|initial_lr|eps|betas/items/.*))?|scheduler|scaler.*"
    r"|scheduler/last_batch_iteration|optimizer/scalars/\d+/values/step/(value|dtype)|optimizer/groups/\d+/values/betas/items"
)


def _load_changed(folder: str, seeds: range) -> list[str]:
    """Loads one changed index after the other into one engine; returns what went wrong."""
    from hf_zero.errors import CheckpointError

    engine = start(2, "bf16", seed=5)
    text = (Path(folder) / "golden" / "index.json").read_text()
    engine.load_checkpoint(folder)
    expected, wrong, refused = full_state(engine), [], 0
    for seed in seeds:
        changed, path, how = mutate_value(json.loads(text), Random(seed))
        write_index(Path(folder) / "golden", json.dumps(changed))
        what = f"seed {seed}: {how} {'/'.join(map(str, path))}"
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            refused += 1
            if folder not in str(error):
                wrong.append(f"{what}: names no folder: {error}")
            continue
        except Exception as error:
            wrong.append(f"{what}: {error!r}")
            engine.destroy()
            engine = start(2, "bf16", seed=5)
            continue
        differing = differences(full_state(engine), expected)
        if differing and not FREE.fullmatch("/".join(map(str, path))):
            wrong.append(f"{what}: {differing[:3]}")
        if differing:  # keys that a group got stay in it
            engine.destroy()
            engine = start(2, "bf16", seed=5)
    engine.destroy()
    return wrong if refused > len(seeds) // 2 else [*wrong, f"only {refused} of {len(seeds)} were refused"]


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=(pytest.mark.slow, pytest.mark.timeout(3600)))])
def test_a_changed_index_changes_no_run(tmp_path: Path, count: int) -> None:
    shutil.copytree(FOLDERS[-1], tmp_path / "c")
    wrong: Any = ranks.run_ranks(_load_changed, 1, str(tmp_path / "c"), range(count))[0]
    assert wrong == [], "\n".join(wrong)
