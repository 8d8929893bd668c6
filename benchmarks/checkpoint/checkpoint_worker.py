"""One rank of one contender of the checkpoint benchmark. Started by ``checkpoint.py``, also with the Python of a peer's venv.

It reads one JSON object per line from standard input and answers one per line: ``{"do": "save", "folder": F}`` and similar requests, with
their seconds on this rank. Needs only torch, transformers and the contender's package.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.training import ADAMW, build_model, make_batch

WINDOW = 4 * 2**20
BLOCK = 4096


class Contender:
    """Operations of a contender; the callers measure the seconds."""

    def save(self, folder: str) -> None:
        """Save, and return when everything is on the disk."""
        raise NotImplementedError

    def stall(self, folder: str) -> Callable[[], None]:
        """Start a save and return when training may go on; the returned function waits until everything is on the disk."""
        raise NotImplementedError

    def load(self, folder: str) -> None:
        """Restore weights and optimizer."""
        raise NotImplementedError


class Engine(Contender):
    """Engine of hf_zero or DeepSpeed, with the same calls for both."""

    def __init__(self, package: str, stage: int, in_background: bool, model: nn.Module, size: dict[str, int]) -> None:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": size["batch"],
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
        }
        if in_background:
            config["checkpoint"] = {"writer": {"decoupled": True}}
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        module = __import__(package)
        self.engine = module.initialize(model=model, optimizer=optimizer, model_parameters=list(model.parameters()), config=config)[0]
        loss = self.engine(**make_batch(0, dist.get_rank(), size)).loss
        self.engine.backward(loss)
        self.engine.step()

    def save(self, folder: str) -> None:
        self.engine.save_checkpoint(folder)

    def stall(self, folder: str) -> Callable[[], None]:
        self.engine.save_checkpoint(folder)
        return self.engine.wait_for_checkpoint  # type: ignore[no-any-return]

    def load(self, folder: str) -> None:
        self.engine.load_checkpoint(folder)

    def shard_tensors(self) -> list[torch.Tensor]:
        """Return the masters and moments of this rank."""
        found = [unit.master for unit in self.engine.units]
        for state in self.engine.optimizer.inner.state.values():
            found += [value for value in state.values() if torch.is_tensor(value) and value.ndim]
        return found


class Distributed(Contender):
    """torch.distributed.checkpoint of an FSDP2 model: fp32 weights and the moments of Adam, as many bytes as the other contenders."""

    def __init__(self, model: nn.Module, size: dict[str, int]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in model.transformer.h:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model = model
        self.group: Any = None
        self.optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        model(**make_batch(0, dist.get_rank(), size)).loss.backward()
        self.optimizer.step()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": states}

    def save(self, folder: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=folder)

    def stall(self, folder: str) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        # The thread of the save issues collectives, which would mix with the training loop's in one group.
        self.group = self.group or dist.new_group(backend="gloo")
        pending: Any = dcp.async_save(self._state(), checkpoint_id=folder, process_group=self.group)
        return lambda: pending.result() and None

    def load(self, folder: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def write_plainly(path: Path, nbytes: int, direct: bool) -> None:
    """Write ``nbytes`` from one window of 4 MiB, then fsync; with ``direct`` past the page cache, in whole blocks only."""
    window = mmap.mmap(-1, WINDOW)
    window.write(os.urandom(WINDOW))
    data = memoryview(window)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (getattr(os, "O_DIRECT", 0) if direct else 0))
    nbytes -= nbytes % BLOCK if direct else 0
    for start in range(0, nbytes, WINDOW):
        os.write(descriptor, data[: min(WINDOW, nbytes - start)])
    os.fsync(descriptor)
    os.close(descriptor)


def upload_plainly(folder: Path, url: str) -> None:
    """Upload this rank's share of the files below ``folder`` with boto3's ``upload_file`` as it comes: 10 parts of 8 MiB at a time."""
    import boto3

    client = boto3.client("s3")
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    for path in files[dist.get_rank() :: dist.get_world_size()]:
        client.upload_file(str(path), bucket, f"{prefix}/{path.relative_to(folder)}")


def inspect(subject: Contender, folder: str) -> dict[str, float]:
    """Return the host memory (anonymous bytes at the peak) that a save takes, and the bytes that a load reads from files, on this rank."""
    before = peak = _status("/proc/self/status", "RssAnon") * 1024
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, _status("/proc/self/status", "RssAnon") * 1024)

    watcher = threading.Thread(target=watch)
    watcher.start()
    subject.save(folder)
    done.set()
    watcher.join()
    read = _status("/proc/self/io", "rchar")
    subject.load(folder)
    return {"grown": peak - before, "read": _status("/proc/self/io", "rchar") - read}


def _status(path: str, key: str) -> int:
    return int(next(line for line in Path(path).read_text().splitlines() if line.startswith(key)).split()[1])


def build(contender: str, model: nn.Module, size: dict[str, int]) -> Contender:
    """Return the contender named ``hf_zero-N``, ``hf_zero-N-background``, ``deepspeed-N`` or ``dcp``."""
    if contender == "dcp":
        return Distributed(model, size)
    package, stage, *rest = contender.split("-")
    return Engine(package, int(stage), bool(rest), model, size)


def serve(contender: str, size: dict[str, int], answers: Any) -> None:
    """Answer requests until standard input ends."""
    subject = build(contender, build_model("gpt2", size).train(), size)
    copies: list[torch.Tensor] = []
    rests: list[Callable[[], None]] = []
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        folder = request.get("folder", "")
        dist.barrier()
        start, found = time.perf_counter(), {}
        if request["do"] == "save":
            subject.save(folder)
        elif request["do"] == "stall":
            rests.append(subject.stall(folder))
        elif request["do"] == "rest":
            rests.pop()()
        elif request["do"] == "load":
            subject.load(folder)
        elif request["do"] == "inspect":
            found = inspect(subject, folder)
        elif request["do"] == "upload":
            upload_plainly(Path(folder), request["url"])
        elif request["do"] in ("disk", "direct"):
            write_plainly(Path(f"{folder}-{dist.get_rank()}"), request["nbytes"], request["do"] == "direct")
        elif request["do"] == "copy" and isinstance(subject, Engine):
            tensors = subject.shard_tensors()
            copies = copies or [torch.empty_like(tensor).fill_(0) for tensor in tensors]
            start = time.perf_counter()
            for target, source in zip(copies, tensors, strict=True):
                target.copy_(source)
        answers.write(json.dumps({"seconds": time.perf_counter() - start, **found}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender")
    parser.add_argument("size", type=json.loads, help="JSON: layers, width, heads, vocab, length, batch")
    arguments = parser.parse_args()
    # Libraries print to standard output, so the answers need a channel of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    serve(arguments.contender, arguments.size, answers)
    os._exit(0)  # some contenders leave threads running


if __name__ == "__main__":
    main()
