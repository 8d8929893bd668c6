"""`ds_to_universal`, DeepSpeed's step between a save and a load on other ranks: every checkpoint of ours is universal, so it is copied."""

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
    """Return the parsed command line; options that divide the work, or leave out parts of DeepSpeed's conversion, have no effect on a
    copy.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input_folder", required=True, help="folder of one checkpoint")
    parser.add_argument("--output_folder", required=True, help="folder that becomes the universal checkpoint")
    for name, default in (("num_extract_workers", 4), ("num_merge_workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help="no effect")
    for name in ("keep_temp_folder", "no_strict", "inject_missing_state"):
        parser.add_argument(f"--{name}", action="store_true", help="no effect")
    return parser.parse_args(words)


def main(args: Any = None) -> None:
    """Copies a checkpoint, whole or not at all, and names the copy in ``latest_universal`` beside it.

    Args:
        args: Its ``input_folder`` and ``output_folder`` are read; None reads the command line.

    Raises:
        CheckpointError: The input is no complete checkpoint of ours, or something else is in the place of the output.
        OSError: The file system refuses.
    """
    args = parse_arguments() if args is None else args
    source, target = Path(args.input_folder), Path(args.output_folder)
    if not folders.is_complete(source):
        raise CheckpointError(f"{source} is no complete checkpoint of hf_zero; `hf-zero convert` reads those of DeepSpeed")
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
