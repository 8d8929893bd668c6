"""``hf-zero trace``: a recording of one step as rows of what runs beside what."""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_zero.errors import ConfigError
from hf_zero.system import own_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("folder", type=Path, help="recordings of the ranks: hf_zero.trace_folder, or torch.profiler's export_chrome_trace")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where overlap.json and overlap.png go (default: beside the recordings)")
    parser.add_argument("--no-plot", action="store_true", help="no picture, so no matplotlib")


def run(options: argparse.Namespace) -> int:
    """Reads the recordings, writes trace and picture, prints a summary; returns 0.

    Raises:
        ConfigError: The folder has no recordings, or nothing can be written.
    """
    from hf_zero.profiling.overlap import draw, overlap_of, summary_of, write_trace
    from hf_zero.profiling.recordings import OVERLAP, read_recordings

    target: Path = options.out or options.folder
    overlaps = [overlap_of(recording) for recording in read_recordings(options.folder)]
    try:
        own_files.make_folders(target)
    except OSError as error:
        raise ConfigError(f"--out {target} cannot be made: {error}") from error
    write_trace(overlaps, target / OVERLAP)
    if not options.no_plot:
        draw(overlaps, target / "overlap.png")
    print(summary_of(overlaps))
    print(f"written: {target / OVERLAP} (open it in ui.perfetto.dev or chrome://tracing)" + ("" if options.no_plot else ", overlap.png"))
    return 0
