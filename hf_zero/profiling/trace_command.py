"""Define and run ``hf-zero trace``, which shows the overlap of computation and communication in recordings."""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_zero.errors import ConfigError
from hf_zero.system import own_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hf-zero trace`` to ``parser``."""
    parser.add_argument("folder", type=Path, help="recordings of the ranks: hf_zero.trace_folder, or torch.profiler's export_chrome_trace")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for overlap.json and overlap.png (default: the folder of the recordings)"
    )
    parser.add_argument("--no-plot", action="store_true", help="write no picture; then matplotlib is not needed")


def run(options: argparse.Namespace) -> int:
    """Read the recordings, write trace and picture, print a summary, and return 0.

    Raises:
        ConfigError: The folder has no readable recordings, or the results cannot be written.
    """
    from hf_zero.profiling.overlap import draw, overlap_of, summary_of, write_trace
    from hf_zero.profiling.recordings import OVERLAP, read_recordings

    target: Path = options.out or options.folder
    overlaps = [overlap_of(recording) for recording in read_recordings(options.folder)]
    try:
        own_files.make_folders(target)
    except OSError as error:
        raise ConfigError(f"--out {target} cannot be created: {error}") from error
    write_trace(overlaps, target / OVERLAP)
    if not options.no_plot:
        draw(overlaps, target / "overlap.png")
    print(summary_of(overlaps))
    print(f"written: {target / OVERLAP} (open it in ui.perfetto.dev or chrome://tracing)" + ("" if options.no_plot else ", overlap.png"))
    return 0
