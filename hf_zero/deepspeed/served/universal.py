"""Implement `ds_to_universal`, DeepSpeed's conversion for a load on other ranks: hf_zero's checkpoints need none, so it copies them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.commit import folders, staging
from hf_zero.checkpoint.files.tensor_reader import RangeReader
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import INDEX_FILE
from hf_zero.errors import CheckpointError
from hf_zero.system import own_files

LATEST_UNIVERSAL = "latest_universal"


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
    own_files.write_text(target.parent / LATEST_UNIVERSAL, target.name)
