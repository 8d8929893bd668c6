"""Serve programs that read DeepSpeed's own checkpoint files: names of files and keys, `ds_to_universal`, and files for converters.

Lightning's converter to one file takes the weights from ``get_fp32_state_dict_from_zero_checkpoint``, and then reads the stage and its own
state from DeepSpeed's pickle files. Checkpoints of hf_zero contain no pickle files. So this process writes the files that Lightning reads
to a temporary folder, from values in JSON and safetensors files, and deletes them at its end. `ds_to_universal` converts for a load on
other ranks in DeepSpeed; hf_zero's checkpoints need no conversion, so it copies them.
"""

from __future__ import annotations

import argparse
import atexit
import os
import re
from pathlib import Path
from typing import Any, Final

import torch

from hf_zero.checkpoint.commit import folders, staging
from hf_zero.checkpoint.files.tensor_reader import RangeReader
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import INDEX_FILE, LATEST_UNIVERSAL_FILE, VALUES_FILE
from hf_zero.checkpoint.format.values import Decoder
from hf_zero.checkpoint.state.beside import divided
from hf_zero.checkpoint.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
from hf_zero.errors import CheckpointError
from hf_zero.system import own_files
from hf_zero.system.object_store import Place, place_of

_ENDING = ".pt"
_OURS = re.compile(r"mp_rank_00_[0-9a-f]{12}_(optim|model)_states\.pt")
_scratch: Path | None = None
BASE_OPTIMIZER_STATE: Final = "base_optimizer_state"
BASE_OPTIMIZER_STATE_STEP: Final = "base_optimizer_state_step"
BUFFER_NAMES: Final = "buffer_names"
CAT_DIM: Final = "cat_dim"
CLIP_GRAD: Final = "clip_grad"
DS_VERSION: Final = "ds_version"
FP32_FLAT_GROUPS: Final = "fp32_flat_groups"
FROZEN_PARAM_FRAGMENTS: Final = "frozen_param_fragments"
FROZEN_PARAM_SHAPES: Final = "frozen_param_shapes"
GROUP_PADDINGS: Final = "group_paddings"
LOSS_SCALER: Final = "loss_scaler"
OPTIMIZER_STATE_DICT: Final = "optimizer_state_dict"
ORIGINAL_VOCAB_SIZE: Final = "original_vocab_size"
PADDED_VOCAB_SIZE: Final = "padded_vocab_size"
PARAM: Final = "param"
PARAMETER_TO_AVERAGE_PATTERNS: Final = "parameter_to_average_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: Final = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: Final = "parameter_with_row_parallelism_patterns"
PARAMETER_WITH_SUB_PARAMS: Final = "parameter_with_sub_params"
PARAM_GROUPS: Final = "param_groups"
PARAM_N_SUB_PARAMS: Final = "param_n_sub_params"
PARAM_SHAPES: Final = "param_shapes"
PARAM_SLICE_MAPPINGS: Final = "param_slice_mappings"
PARTITION_COUNT: Final = "partition_count"
PIPELINE_REPLICATED_PARAMETER_PATTERNS: Final = "pipeline_replicated_parameter_patterns"
SINGLE_PARTITION_OF_FP32_GROUPS: Final = "single_partition_of_fp32_groups"
SUB_PARAM_SHAPE: Final = "sub_param_shape"
TP_REPLICATED_PARAMETER_PATTERNS: Final = "tp_replicated_parameter_patterns"
UNIVERSAL_CHECKPOINT_INFO: Final = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY: Final = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE: Final = 0.2
VOCABULARY_PARAMETER_PATTERNS: Final = "vocabulary_parameter_patterns"
ZERO_STAGE: Final = "zero_stage"


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
    return _write({**index.counters, **_client_state(folder, index)}, "model_states")


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return a list with the one file of ``get_model_state_file``; DeepSpeed has one file per rank at stage 3.

    Args:
        checkpoint_dir: Folder of the checkpoint (with its tag).

    Raises:
        CheckpointError: The folder is not a complete checkpoint.
    """
    return [get_model_state_file(checkpoint_dir, 0)]


def read_client_state(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the script's ``client_state`` of the checkpoint that ``latest`` in ``checkpoint_dir`` names: rank 0's; local.

    Raises:
        CheckpointError: There is no complete checkpoint, or a value in it is a pickle.
    """
    folder = folders.find_latest(place_of(checkpoint_dir))
    if folder is None:
        raise CheckpointError(
            f"{os.fspath(checkpoint_dir)} holds no checkpoint: give the folder that was saved to, which has a file `latest`"
        )
    return _client_state(folder, Index.from_json(folders.read_index(folder), str(folder / INDEX_FILE)))


def _client_state(folder: Place, index: Index) -> dict[str, Any]:
    reader = RangeReader(folder, index.files)
    held = Decoder(lambda name: reader.whole(VALUES_FILE, name), str(folder / INDEX_FILE)).decode(index.client_state)
    return dict(divided(held)[0])


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


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line; options of DeepSpeed's conversion are accepted but have no effect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input_folder", required=True, help="folder of one checkpoint")
    parser.add_argument("--output_folder", required=True, help="folder that becomes the universal checkpoint")
    for name, default in (("num_extract_workers", 4), ("num_merge_workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help="no effect")
    for name in ("keep_temp_folder", "no_strict", "inject_missing_state"):
        parser.add_argument(f"--{name}", action="store_true", help="no effect")
    return parser.parse_args(words)


def main(args: Any = None) -> None:
    """Copy a checkpoint atomically, and write the name of the copy to the file ``latest_universal`` beside it.

    Args:
        args: Namespace with ``input_folder`` and ``output_folder``; None reads the command line.

    Raises:
        CheckpointError: The input is not a complete checkpoint of hf_zero, or the output exists and is something else.
        OSError: A file cannot be read or written.
    """
    args = parse_arguments() if args is None else args
    source, target = Path(args.input_folder), Path(args.output_folder)
    if not folders.is_complete(source):
        raise CheckpointError(f"{source} is not a complete hf_zero checkpoint; `hf-zero convert` reads DeepSpeed checkpoints")
    text = folders.read_index(source)
    files = Index.from_json(text, str(source / INDEX_FILE)).files
    RangeReader(source, files).check_sizes()
    folder = staging.begin(target.parent, target.name)
    try:
        for name in files:
            own_files.copy_file(source / name, folder / name)
        staging.finalize(folder, text)
        staging.publish(folder, target.parent, target.name)
    except BaseException:
        staging.abandon(folder)
        raise
    own_files.write_text(target.parent / LATEST_UNIVERSAL_FILE, target.name)


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """Return the path of the file with the module of a model-parallel rank ("00", ...)."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str | os.PathLike[str], dp_rank: int, mp_rank: int) -> str:
    """Return the path of the file with the optimizer state of a data-parallel rank."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str | os.PathLike[str], layer_id: str, tp_rank: int) -> str:
    """Return the path of the file with a layer of a pipeline."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")
