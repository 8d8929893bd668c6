"""Write files that callers of DeepSpeed's converter read with `torch.load`: unsharded weights, `get_model_state_file`, `get_optim_files`.

Lightning's converter to one file takes the weights from ``get_fp32_state_dict_from_zero_checkpoint``, and then reads the stage and its own
state from DeepSpeed's pickle files. Checkpoints of hf_zero contain no pickle files. So this process writes the files that Lightning reads
to a temporary folder, from values in JSON and safetensors files, and deletes them at its end.
"""

from __future__ import annotations

import atexit
import os
import re
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.commit import folders
from hf_zero.checkpoint.files.tensor_reader import RangeReader
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import INDEX_FILE, VALUES_FILE
from hf_zero.checkpoint.format.values import Decoder
from hf_zero.checkpoint.state.beside import divided
from hf_zero.checkpoint.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
from hf_zero.system import own_files
from hf_zero.system.object_store import Place, place_of

_ENDING = ".pt"
_OURS = re.compile(r"mp_rank_00_[0-9a-f]{12}_(optim|model)_states\.pt")
_scratch: Path | None = None


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: str = "fp32",
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Convert a checkpoint to unsharded weights like ``convert_zero_checkpoint_to_fp32_state_dict``, in "fp32", "bf16" or "fp16".

    The files are safetensors; ``safe_serialization=False`` writes `pytorch_model.bin`, a pickle file.

    Raises:
        FileNotFoundError, ValueError: The checkpoint does not exist or is damaged, or the type is unknown.
    """
    convert(checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag, exclude_frozen_parameters, dtype)


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return a list with one file for `torch.load` that has the ZeRO stage of a checkpoint; DeepSpeed has one file per rank.

    Args:
        checkpoint_dir: Folder of the checkpoint (with its tag).

    Raises:
        CheckpointError: The folder is not a complete checkpoint.
    """
    _, index = _open(checkpoint_dir)
    return [_write({"optimizer_state_dict": {"zero_stage": index.stage}}, "optim_states")]


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """Return the path of a file for `torch.load` with the engine's counters and the script's ``client_state``, without weights.

    Args:
        checkpoint_dir: Folder of the checkpoint (with its tag).
        zero_stage: Has no effect, because the checkpoint contains its stage.

    Raises:
        CheckpointError: The folder is not a complete checkpoint.
    """
    folder, index = _open(checkpoint_dir)
    reader = RangeReader(folder, index.files)
    held = Decoder(lambda name: reader.whole(VALUES_FILE, name), str(folder / INDEX_FILE)).decode(index.client_state)
    return _write({**index.counters, **divided(held)[0]}, "model_states")


def _open(checkpoint_dir: str | os.PathLike[str]) -> tuple[Place, Index]:
    path = place_of(checkpoint_dir)
    folder = folders.find(path.parent, path.name)
    return folder, Index.from_json(folders.read_index(folder), str(folder / INDEX_FILE))


def _write(content: dict[str, Any], kind: str) -> str:
    global _scratch
    if _scratch is None:
        _scratch = own_files.scratch_folder("hf_zero_state_files_")
        atexit.register(own_files.remove_folder, _scratch, lambda name: _OURS.fullmatch(name) is not None, maker=os.getpid())
    path = _scratch / f"mp_rank_00_{os.urandom(6).hex()}_{kind}{_ENDING}"
    with own_files.replacing(path) as file:
        torch.save(content, file)
    return str(path)
