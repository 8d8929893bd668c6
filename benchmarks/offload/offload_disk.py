"""Time of the files of an offloaded optimizer alone, which bounds a step that waits for them."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any


def seconds_alone(path: str, nbytes: int, ranks: int, rounds: int) -> float:
    """Return the median seconds until every rank has read ``nbytes`` of its file and written them back, at the same time, like a step.

    Args:
        path: Folder on the disk.
        nbytes: Bytes of masters and moments of one rank.
        ranks: Number of processes that do it at the same time.
        rounds: Number of repetitions.
    """
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(ranks), context.Queue()
    processes = [context.Process(target=_serve, args=(path, rank, nbytes, rounds, together, answers)) for rank in range(ranks)]
    for process in processes:
        process.start()
    times = [answers.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return statistics.median(max(one[index] for one in times) for index in range(rounds))


def _serve(path: str, rank: int, nbytes: int, rounds: int, together: Any, answers: Any) -> None:
    """Read one half of the file while writing the other, then exchange the halves: the whole file once in each direction."""
    import torch

    from hf_zero.memory.buffers import ALIGNMENT, HostMemory
    from hf_zero.offload.files import SwapFile, SwapFolder

    half = -(-nbytes // (2 * ALIGNMENT)) * ALIGNMENT
    folder = SwapFolder(Path(path), rank)
    file = SwapFile(folder.path / "alone")
    file.reserve(2 * half)
    memory = HostMemory(torch.device("cpu"))
    read, written = memory.empty(half, torch.uint8), memory.empty(half, torch.uint8)
    for offset in (0, half):
        file.write(offset, written.fill_(1)).wait()
    seconds = []
    for _ in range(rounds):
        together.wait(60)
        start = time.perf_counter()
        for offset in (0, half):
            transfers = file.read(offset, read), file.write(half - offset, written)
            for transfer in transfers:
                transfer.wait()
        seconds.append(time.perf_counter() - start)
    file.close()
    folder.remove()
    answers.put(seconds)
