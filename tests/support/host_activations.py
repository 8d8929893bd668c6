"""Training with activations on the host, by every flag that requests it, compared with the same training without."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_zero.activation_checkpointing import host_activations
from hf_zero.activation_checkpointing.host_activations import HostActivations
from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run, Trace, check_bitwise, initialize, train

LAYERS = 4
FLAGS = ("save_on_cpu", "save_on_cpu, pinned", "activation_offloading", "offload")
KINDS = {"kept": None, "not reentrant": False, "reentrant": True}
EVERY = "1 in 2 blocks"
if "every_n_layers" in inspect.signature(getattr(PreTrainedModel, "activation_checkpointing_enable", lambda: None)).parameters:
    KINDS[EVERY] = False


def llama(adapters: bool = False) -> nn.Module:
    """Return a Llama whose attention has dropout, so that random states matter; the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=LAYERS, attention_dropout=0.1, **sizes))
    if adapters:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["q_proj", "up_proj"])
        )
    return model.train()


@dataclass
class Moved:
    """Counts of a run's tensors that were moved to the host.

    Attributes:
        nbytes: Bytes moved by the engine's hooks.
        weights: Tensors of units among them.
        outer: Calls of the script's own hooks.
        outer_weights: Calls of these hooks with weights.
    """

    nbytes: int = 0
    weights: int = 0
    outer: int = 0
    outer_weights: int = 0


@dataclass
class Training:
    """One training run.

    Attributes:
        flag: One of ``FLAGS``; "" for none.
        kind: One of ``KINDS``.
        run: Stage, precision and steps.
        adapters: Train LoRA adapters beside frozen weights.
    """

    flag: str
    kind: str
    run: Run
    adapters: bool = False
    moved: Moved = field(default_factory=Moved)

    def trace(self) -> Trace:
        """Train with the flag, count the tensors that move to the host, and return the trace of the training; collective."""
        model, reentrant = llama(self.adapters), KINDS[self.kind]
        if reentrant is not None:
            offload = self.flag == "offload"
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable(
                {"use_reentrant": reentrant},
                **({"offload": True} if offload else {}),
                **({"every_n_layers": 2} if self.kind == EVERY else {}),
            )
        engine = initialize(model, self.run)
        storages = {unit.whole.flat.untyped_storage()._cdata for unit in engine.units}
        torch.manual_seed(1 + ranks.rank())
        try:
            with self._counted(storages):
                return train(engine, CASES["llama"].rows, CASES["llama"].forward, self.run, partial(self._micro_step, storages))
        finally:
            engine.destroy()

    def _micro_step(self, storages: set[int], engine: Any, batch: Any, forward: Any, _micro: int) -> float:
        around = context_of(self.flag, engine)
        if isinstance(around, torch.autograd.graph.saved_tensors_hooks):
            around.pack_hook = self._watched(around.pack_hook, storages)
        with around:
            loss = forward(engine, batch)
            engine.backward(loss)
        engine.step()
        return loss.item()

    def _watched(self, pack: Callable[[Tensor], Any], storages: set[int]) -> Callable[[Tensor], Any]:
        @wraps(pack)
        def watched(tensor: Tensor) -> Any:
            self.moved.outer += 1
            self.moved.outer_weights += tensor.untyped_storage()._cdata in storages
            return pack(tensor)

        return watched

    @contextmanager
    def _counted(self, storages: set[int]) -> Iterator[None]:
        copy_out = HostActivations._copy_out

        def counted(host: HostActivations, group: Any, pieces: list[Any]) -> None:
            before = {id(piece) for piece in pieces if piece.host is not None}
            copy_out(host, group, pieces)
            for piece in pieces:
                if id(piece) not in before and piece.host is not None:
                    self.moved.nbytes += piece.host.nbytes
                    self.moved.weights += piece.source.untyped_storage()._cdata in storages

        with mock.patch.object(HostActivations, "_copy_out", counted):
            yield


def context_of(flag: str, engine: Any) -> AbstractContextManager[Any]:
    """Return the context that a script or a trainer puts around forward and backward."""
    if flag.startswith("save_on_cpu"):
        return torch.autograd.graph.save_on_cpu(pin_memory="pinned" in flag, device_type=ranks.device().type)
    if flag == "activation_offloading":
        offloading = importlib.import_module("trl.models.activation_offloading")
        context: AbstractContextManager[Any] = offloading.get_act_offloading_ctx_manager(engine.module, min_offload_size=0)
        return context
    return nullcontext()


@contextmanager
def small_tensors_move() -> Iterator[None]:
    """Make the tensors of tiny models large enough to be moved, inside the context."""
    with mock.patch.object(host_activations, "LEAST_BYTES", 1):
        yield


def check_flags(run: Run, flags: list[str], kinds: list[str], adapters: bool = False) -> dict[str, Moved]:
    """Compare trainings with each flag to the one without, bit for bit; return the moved tensors' counts. Collective."""
    found = {}
    with small_tensors_move():
        for kind in kinds:
            plain = Training("", kind, run, adapters).trace()
            for flag in flags:
                if flag == "offload" and KINDS[kind] is None:
                    continue
                training = Training(flag, kind, run, adapters)
                check_bitwise(training.trace(), plain, f"{flag}, {kind}, stage {run.stage}")
                moved = training.moved
                assert not moved.weights and not moved.outer_weights, f"{flag}, {kind}: {moved}"
                assert moved.nbytes or ranks.device().type == "cpu", f"{flag}, {kind}: nothing was moved"
                found[f"{flag}, {kind}"] = moved
    return found
