"""Writes a small checkpoint with its expected contents: `python -m tests.checkpoint.make_golden_checkpoint FOLDER OPTIMIZER`.

Such folders stay in the repository for every released version of the format, one for flat states and one for
states of whole parameters; ``test_checkpoint_golden.py`` loads them all.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support import ranks
from tests.support.checkpoints import full_state, start, steps

CLIENT_STATE = {"epoch": 2, "pair": (1, "a"), 3: {"x"}, "best": torch.tensor([0.5, 1.5], dtype=torch.float64)}
TAG = "golden"
FOLDERS = sorted((Path(__file__).parents[1] / "golden").glob("checkpoint_v*"))
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}  # by the end of the folder's name


def save(folder: str, optimizer: str) -> dict[str, Any]:
    """Trains for three steps at stage 3 in bf16, saves, and returns the full state."""
    engine = start(3, "bf16", optimizer=OPTIMIZERS[optimizer])
    steps(engine, 0, 3, "bf16")
    engine.save_checkpoint(folder, TAG, CLIENT_STATE)
    state = full_state(engine)
    engine.destroy()
    return state


def main() -> None:
    folder = Path(sys.argv[1])
    state = ranks.run_ranks(save, 2, str(folder), sys.argv[2])[0]
    (folder / "zero_to_fp32.py").unlink()  # the package's own; the tests need the data alone
    save_file(
        {name: value.contiguous() for name, value in state.items() if isinstance(value, torch.Tensor)}, folder / "expected.safetensors"
    )
    ranks.close_pools()


if __name__ == "__main__":
    main()
