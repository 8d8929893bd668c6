"""Record the memory of a step of torch's FSDP2 with context parallelism, on the pretended accelerator on which plans run the engine.

Everything is torch's own: ``fully_shard`` on each block, on the embedding, and on the last norm with the head, as accelerate calls it
(``fsdp2_prepare_model``); parameters in fp32 that are cast to bf16 for use; ``context_parallel`` around forward and backward, balanced for
causal masks; AdamW. Two things that accelerate adds are left out, because the pretended accelerator has no autocast, and both take memory:
autocast, and the copy of the logits in fp32.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method

from hf_zero.plan.inputs import Cluster
from hf_zero.plan.models import PlannedModel, give_memory
from hf_zero.plan.pretended import device_attention, masks_by_values, pretended_world
from hf_zero.plan.recorder import NOWHERE, StorageRecorder
from hf_zero.system.planning import placed


class _Recorder(StorageRecorder):
    """Recorder that also sees the tensors inside of DTensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave operations on DTensors to DTensor, which calls the recorder with the tensors of this rank."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    def peaks_since(self, first: int) -> tuple[int, int]:
        """Return the peaks of device and host in bytes after the change ``first``."""
        now, most = {"device": 0, "host": 0}, {"device": 0, "host": 0}
        for index, change in enumerate(self.changes):
            tier = change.storage.tier
            if tier not in now:
                continue
            now[tier] += change.nbytes
            if index >= first:
                most[tier] = max(most[tier], now[tier])
        return most["device"], most["host"]


def peaks(model: PlannedModel, ranks: int, length: int, strategy: str = "allgather", host: bool = True) -> tuple[int, int]:
    """Train two steps of one rank without values, and return the bytes at the peaks of device and host in the second.

    Args:
        model: A Llama on the meta device; FSDP2 changes it.
        ranks: Number of ranks, which divide the parameters and each sequence.
        length: Tokens of the sequence.
        strategy: How context parallelism exchanges keys and values: "allgather", or "alltoall" for a ring.
        host: Whether parameters, gradients and moments rest on the host.
    """
    with pretended_world(Cluster(ranks, ranks)) as device:
        mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("cp",))
        recorder = _Recorder(device, model.vocabulary)
        set_rotate_method(strategy)
        with _pretended(recorder):
            with placed(NOWHERE):
                give_memory(model.module, device)
            _shard(model.module, mesh, host)
            optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-4)
            _step(model, optimizer, mesh, length)
            gc.collect()
            measured = len(recorder.changes)
            _step(model, optimizer, mesh, length)
    return recorder.peaks_since(measured)


@contextmanager
def _pretended(recorder: StorageRecorder) -> Iterator[None]:
    """Record fake tensors inside the ``with``, with the attention kernels of a GPU."""
    functional = torch.nn.functional
    with ExitStack() as stack:
        for context in (recorder.active(), masks_by_values(), device_attention(False), torch.autograd.set_multithreading_enabled(False)):
            stack.enter_context(context)
        attend = functional.scaled_dot_product_attention

        def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:  # context_parallel reads its name
            return attend(*args, **kwargs)

        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", scaled_dot_product_attention))
        yield


def _shard(module: nn.Module, mesh: DeviceMesh, host: bool) -> None:
    policies = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if host else OffloadPolicy(),
    }
    for block in module.model.layers:
        fully_shard(block, reshard_after_forward=True, **policies)
    fully_shard(module.model.embed_tokens, reshard_after_forward=True, **policies)
    fully_shard([module.model.norm, module.lm_head], reshard_after_forward=False, **policies)
    fully_shard(module, **policies)


def _step(model: PlannedModel, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, length: int) -> None:
    tokens = torch.zeros(1, length, dtype=torch.long, device=mesh.device_type)
    labels, positions = tokens.clone(), torch.arange(length, device=mesh.device_type)[None]
    given = [tokens, labels, positions]
    with context_parallel(mesh, buffers=given, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(given)):
        with torch.autograd.graph.save_on_cpu() if model.moves else nullcontext():
            loss = model.module(input_ids=tokens, position_ids=positions, labels=labels, shift_labels=labels).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
