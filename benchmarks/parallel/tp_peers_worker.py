"""One of two ranks of a peer that splits tiny models. Started by ``tp_peers.py`` with the Python of the peer's venv.

It reads ``{"name": NAME}`` per line and answers with the differences of the peer's loss, logits and gradients from the whole model's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.processes import open_answers
from tests.support import zoo
from tests.tensor_parallel.breadth import perturb, relative, run

SECONDS = 15.0  # time after which a collective that a rank does not join fails

Batch = dict[str, torch.Tensor]


class CannotError(Exception):
    """Error raised where a peer cannot split this architecture; its text is the reason."""


def deepspeed_run(model: nn.Module, batch: Batch) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Run DeepSpeed's AutoTP like Trainer does: ``tp_model_init``, then an engine; return model, loss and logits."""
    import deepspeed

    model = deepspeed.tp_model_init(model=model, tp_size=dist.get_world_size(), dtype=torch.float32)
    config = {"train_micro_batch_size_per_gpu": zoo.ROWS, "tensor_parallel": {"autotp_size": dist.get_world_size()}}
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    torch.manual_seed(3)
    out = engine(**batch)
    engine.backward(out.loss)
    return engine.module, out.loss.detach(), out.logits.detach() if "logits" in out else out[1].detach()


def transformers_run(model: nn.Module, batch: Batch) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Run transformers' own plan: the model is saved and loaded with ``tp_plan="auto"``; return model, loss and logits."""
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [own]
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            model.save_pretrained(folders[0])  # type: ignore[operator]
        dist.barrier()
        split = type(model).from_pretrained(folders[0], tp_plan="auto", dtype=torch.float32).train()  # type: ignore[attr-defined]
        dist.barrier()
    return split, *run(split, batch)


PEERS: dict[str, Callable[[nn.Module, Batch], tuple[nn.Module, torch.Tensor, torch.Tensor]]] = {
    "deepspeed": deepspeed_run,
    "transformers": transformers_run,
}


def whole_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient, gathered if it is a DTensor; None without one."""
    grad = param.grad
    return grad.full_tensor() if grad is not None and hasattr(grad, "full_tensor") else grad


def part_of(local: torch.Tensor, whole: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the part of ``values``, laid out like ``whole``, that belongs to ``local``, found by the rows of ``whole`` that it holds.

    Raises:
        CannotError: ``local`` is no selection along one dimension.
    """
    layouts = [(whole, values)] if whole.dim() != 2 else [(whole, values), (whole.t(), values.t())]
    for candidate, wanted in layouts:
        if candidate.shape == local.shape:
            return wanted
        dims = [dim for dim in range(local.dim()) if local.dim() == candidate.dim() and local.shape[dim] != candidate.shape[dim]]
        if len(dims) != 1:
            continue
        rows = {row.numpy().tobytes(): index for index, row in enumerate(candidate.movedim(dims[0], 0).contiguous())}
        found = [rows.get(row.numpy().tobytes()) for row in local.movedim(dims[0], 0).contiguous()]
        if None not in found:
            return wanted.index_select(dims[0], torch.tensor(found))
    raise CannotError(f"a parameter of shape {tuple(local.shape)} is no part of one of shape {tuple(whole.shape)}")


def compare(name: str, peer: str) -> dict[str, Any]:
    """Return the largest relative differences of one architecture."""
    whole, split = zoo.build(name), zoo.build(name)
    perturb(whole)
    perturb(split)
    batch = zoo.batch(name, torch.Generator().manual_seed(0))
    expected = run(whole, batch)
    before = {key: param.detach().clone() for key, param in whole.named_parameters()}
    split, loss, logits = PEERS[peer](split, batch)
    grads = {key: param.grad for key, param in whole.named_parameters() if param.grad is not None}
    floor = 1e-4 * max(float(grad.abs().max()) for grad in grads.values())
    params = dict(split.named_parameters())
    local = {key: param.to_local() if hasattr(param, "to_local") else param for key, param in params.items()}
    if not any(key in before and param.numel() < before[key].numel() for key, param in local.items()):
        raise CannotError("nothing is split")
    worst = 0.0
    for key, wanted in grads.items():
        found = whole_gradient(params[key]) if key in params else None
        if found is None:
            worst = max(worst, 1.0 if wanted.any() else 0.0)
            continue
        with torch.no_grad():
            place = params[key].full_tensor() if hasattr(params[key], "full_tensor") else params[key].detach()
            part = part_of(place, before[key], wanted)
        worst = max(worst, float((found - part).abs().max()) / max(float(wanted.abs().max()), floor))
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    return {"loss": relative(loss, expected[0]), "logits": relative(logits, expected[1]), "grad": worst}


def answer(name: str, peer: str) -> dict[str, Any]:
    """Return the result of ``compare``, or its error; ``broken`` when the ranks are no longer in step."""
    try:
        return compare(name, peer)
    except Exception as error:  # any error becomes a cell of the table
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0] if lines else ''}"
        return {"error": text[:160], "broken": "gloo" in str(error).lower() or "timed out" in str(error).lower()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    peer = parser.parse_args().peer
    answers = open_answers()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    import transformers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    if peer == "deepspeed":
        import deepspeed

        versions["deepspeed"] = deepspeed.__version__
    answers.write(json.dumps(versions) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line)["name"], peer)) + "\n")


if __name__ == "__main__":
    main()
