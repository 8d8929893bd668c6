"""Record one optimizer step with torch's profiler, and read its recordings: Chrome's format, one file per rank."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hf_zero.errors import ConfigError
from hf_zero.observe import log_rank0, logger
from hf_zero.system import own_files
from hf_zero.system.reading import reading, require_few_values
from hf_zero.system.text_file import read_bytes

OURS = "hf_zero::"
OVERLAP = "overlap.json"  # trace that `hf-zero trace` writes into the same folder
_LIMIT_BYTES = 2 << 30
_WINDOW_BYTES = 1 << 20
_UNFOLDED_BYTES = 16 << 20
_FOLDS = 40  # maximum ratio of text to gzip size; recordings of torch have about 15
_ADVICE = "Make recordings with hf_zero.trace_folder, or with torch.profiler's export_chrome_trace"


@dataclass(frozen=True)
class Event:
    """One event of a recording, with a duration.

    Attributes:
        name: Name of the operation, annotation or kernel.
        kind: The profiler's category: cpu_op, user_annotation, kernel, ...
        thread: Process and thread, or device and stream.
        begin: Begin in microseconds.
        end: End in microseconds.
        correlation: Number that a driver call shares with the kernel that it launched; -1 without one.
    """

    name: str
    kind: str
    thread: tuple[Any, Any]
    begin: float
    end: float
    correlation: int = -1


@dataclass(frozen=True)
class Recording:
    """Recording of one rank.

    Attributes:
        rank: Number of the rank.
        events: Events of the recording, sorted by begin.
    """

    rank: int
    events: list[Event]


def read_recordings(folder: Path) -> list[Recording]:
    """Return the recordings in ``folder``, sorted by rank, with times of one clock.

    Args:
        folder: Folder with ``*.json`` and ``*.json.gz`` files.

    Raises:
        ConfigError: The folder has no recordings, a file cannot be read, or a recording has no phases of hf_zero.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder. {_ADVICE}")
    paths = sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")) and path.name != OVERLAP)
    if not paths:
        raise ConfigError(f"{folder} contains no recording (*.json, *.json.gz). {_ADVICE}")
    found = [read_recording(path, index) for index, path in enumerate(paths)]
    ranks = [recording.rank for recording in found]
    if len(set(ranks)) < len(ranks):
        raise ConfigError(f"{folder} contains several recordings of one rank ({', '.join(map(str, sorted(ranks)))}): keep one per rank")
    return sorted(found, key=lambda recording: recording.rank)


def read_recording(path: Path, index: int) -> Recording:
    """Return the recording of one file; ``index`` is its rank if neither the content nor the name gives it.

    Raises:
        ConfigError: The file cannot be read, or has no phases of hf_zero.
    """
    with reading(path, ConfigError, _ADVICE):
        raw = read_bytes(path, _LIMIT_BYTES)
        raw = _unfolded(raw) if path.suffix == ".gz" else raw
        require_few_values(raw)
        content = json.loads(raw)
        base = float(content.get("baseTimeNanoseconds") or 0) / 1000
        events = [event for row in content["traceEvents"] if (event := _event(row, base)) is not None]
        rank = _rank(content, path, index)
    if not any(event.name.startswith(OURS) for event in events):
        raise ConfigError(f"{path} has no phases of hf_zero: record while an engine trains, with its step. {_ADVICE}")
    return Recording(rank, sorted(events, key=lambda event: (event.begin, -event.end)))


def _unfolded(data: bytes) -> bytes:
    """Return the uncompressed content of a gzip file.

    Raises:
        ValueError: The data are not gzip, or their content is too large for a recording.
    """
    most = _UNFOLDED_BYTES + _FOLDS * len(data)
    if sum(len(window) for window in _windows(data, most)) > most:  # before any content is kept
        raise ValueError(f"its {len(data):,} bytes decompress to more than {most:,}, which is too large for a recording")
    return b"".join(_windows(data, most))


def _windows(data: bytes, most: int) -> Iterator[bytes]:
    """Yield the uncompressed content in pieces of at most 1 MiB, until they are more than ``most`` bytes together."""
    rest, found = data, 0
    while rest and found <= most:
        member = zlib.decompressobj(wbits=31)  # gzip's head
        while not member.eof and found <= most:
            window = member.decompress(rest, _WINDOW_BYTES)
            rest = member.unconsumed_tail
            found += len(window)
            yield window
            if not window and not rest and not member.eof:
                raise ValueError("the file ends inside gzip data")
        rest = member.unused_data.lstrip(b"\0")


def _event(row: Mapping[str, Any], base: float) -> Event | None:
    if row.get("ph") != "X":
        return None
    begin = float(row["ts"]) + base
    correlation = row.get("args", {}).get("correlation", -1)
    where = (row.get("pid"), row.get("tid"))
    return Event(str(row["name"]), str(row.get("cat", "")), where, begin, begin + float(row.get("dur", 0)), int(correlation))


def _rank(content: Mapping[str, Any], path: Path, index: int) -> int:
    told = (content.get("distributedInfo") or {}).get("rank")
    named = re.search(r"rank[_-]?(\d+)", path.name)
    return int(told) if told is not None else int(named[1]) if named else index


class RecordedStep:
    """Watcher that records one optimizer step of this rank and writes ``<folder>/rank<N>.json`` in Chrome's format.

    Args:
        folder: Folder of the recordings; created if it does not exist.
        step: Number of optimizer steps before the recorded one.
        rank: Number of this rank.
        device: The training device.

    Raises:
        ConfigError: The folder cannot be created.
    """

    def __init__(self, folder: Path, step: int, rank: int, device: torch.device) -> None:
        try:
            own_files.make_folders(folder)
        except OSError as error:
            raise ConfigError(f"hf_zero.trace_folder is {str(folder)!r}, which cannot be created: {error}") from error
        self._path = folder / f"rank{rank}.json"
        self._left = step
        self._activities = [ProfilerActivity.CPU]
        if device.type != "cpu":
            kinds = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
            self._activities.append(kinds.get(device.type, ProfilerActivity.PrivateUse1))
        self._profile: profile | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch one phase of the engine: recording begins with a training forward and ends with the next ``step``."""
        trains = name != "forward" or torch.is_grad_enabled()
        if self._left == 0 and self._profile is None and name == "forward" and trains:
            self._begin()
        yield
        if name != "step":
            return
        if self._profile is not None:
            self._end(self._profile)
        self._left -= 1

    def _begin(self) -> None:
        threads: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # updates run in a separate thread
        self._profile = profile(activities=self._activities, experimental_config=threads)
        self._profile.start()

    def _end(self, running: profile) -> None:
        running.stop()
        self._profile = None
        try:
            with own_files.for_library(self._path.parent) as inside:
                running.export_chrome_trace(str(inside / self._path.name))
        except OSError as error:  # all ranks, including this one, continue to train
            logger.error("the recording of the step is lost, because %s cannot be written: %s", self._path, error)
            return
        log_rank0("one step was recorded; to analyse it, run: hf-zero trace %s", self._path.parent)
