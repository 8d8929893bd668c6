"""One training under torch.compile with everything that a script does between its steps, and counts of what was compiled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import parity, ranks
from tests.support.models import VOCAB, Batch
from tests.support.parity import Run

LAYERS = 2
STEPS = 6


@dataclass(frozen=True)
class Case:
    """Training of a small Llama or Mixtral by two ranks.

    ``way``: "" (nothing is compiled), "engine" (``engine.compile()``), "regions" (accelerate's regional compilation of the engine's
    model), "before" (blocks are compiled before there is an engine) or "wrapped" (they are replaced by wrappers of ``torch.compile``).
    ``kind``: what is trained: "", "lora", "tp", "sp", "ep" or "pp".
    """

    stage: int
    way: str = ""
    kind: str = ""
    checkpointing: str = ""
    offload: bool = False
    dtype: str = "fp32"
    use_cache: bool = False
    deepcompile: bool = False
    backend: str = "aot_eager"
    generates: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Run:
        """The configuration."""
        extra: dict[str, Any] = {**self.extra}
        if self.offload:
            extra["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
            if self.stage == 3:
                extra["zero_optimization"]["offload_param"] = {"device": "cpu"}
        if self.kind == "tp":
            extra["tensor_parallel"] = {"autotp_size": 2}
        if self.kind == "ep":
            extra["expert_parallel"] = {"enabled": True, "autoep_size": 2}
        if self.kind == "pp":
            extra["pipeline"] = {"stages": 2}
        if self.deepcompile:
            extra["compile"] = {"deepcompile": True}
        return Run(stage=self.stage, dtype=self.dtype, clip=0.5, extra=extra)


@dataclass
class Seen:
    """What a run leaves on this rank: losses, norms and other results in the order of the script; counts (graphs, breaks) after each
    step, weights at the end."""

    values: list[Any] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)


def build(case: Case) -> nn.Module:
    """The model, its weights by a fixed seed."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": LAYERS, "max_position_embeddings": 64, "use_cache": case.use_cache,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if case.kind == "ep":
            model: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        if case.kind == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"]))
    if case.checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": case.checkpointing == "reentrant"})
    return model.train()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers."""
    return list(next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == LAYERS))


def compile_model(case: Case, target: Any) -> None:
    """Compile a model, or the model of an engine, in the way of ``case``."""
    if case.way == "engine":
        target.compile(backend=case.backend)
    elif case.way == "regions":
        from accelerate.utils.other import compile_regions_deepspeed

        compile_regions_deepspeed(target.module if hasattr(target, "module") else target, backend=case.backend)
    elif case.way == "before":
        for block in blocks_of(target):
            block.compile(backend=case.backend)
    elif case.way == "wrapped":
        layers: Any = next(module for module in target.modules() if isinstance(module, nn.ModuleList) and len(module) == LAYERS)
        for number, block in enumerate(list(layers)):
            layers[number] = torch.compile(block, backend=case.backend)


def counts() -> tuple[int, int]:
    """Graphs that were compiled, and graph breaks, since the last reset."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def reset() -> None:
    """Forget what was compiled and counted."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


def tokens_of(step: int, rows: int, rank: int, length: int = 12) -> Tensor:
    """Token ids of one rank in one step."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(11 * step + rank))


class Script:
    """The training script: an engine, its batches, and the calls between steps."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.mpu: Any = None
        model = build(case)
        if case.kind == "sp":
            from hf_zero.integrations.ulysses import UlyssesSPAttentionHF

            self.mpu = UlyssesSPAttentionHF.register_with_transformers(
                model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=2
            )
        if case.way in ("before", "wrapped"):
            compile_model(case, model)
        self.engine = parity.initialize(model, case.run(), **({"mpu": self.mpu} if self.mpu is not None else {}))
        if case.way not in ("", "before", "wrapped"):
            compile_model(case, self.engine)

    def loss(self, step: int, rows: int) -> Tensor:
        """The loss of this rank's batch."""
        shared = self.case.kind in ("tp", "sp", "pp")
        tokens = tokens_of(step, rows, 0 if shared else ranks.rank())
        if self.case.kind == "sp":
            from tests.support.sequences import cut, loss_over_slices

            positions = torch.arange(tokens.shape[1]).expand_as(tokens).clone()
            batch: Batch = cut({"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions}, ranks.rank(), 2)
            return loss_over_slices(self.engine, batch, self.mpu.get_sequence_parallel_group())
        loss: Tensor = self.engine(input_ids=tokens, labels=tokens).loss
        return loss

    def train(self, step: int, rows: int = 2) -> list[float]:
        """One step: its loss and its norm."""
        loss = self.loss(step, rows)
        self.engine.backward(loss)
        self.engine.step()
        return [float(loss.detach()), parity.as_float(self.engine.get_global_grad_norm())]

    def evaluate(self, step: int) -> float:
        """The loss without gradients."""
        self.engine.eval()
        with torch.no_grad():
            loss = float(self.loss(step, 2))
        self.engine.train()
        return loss

    def generate(self) -> list[int]:
        """Tokens that the model writes."""
        self.engine.eval()
        found = self.engine.module.generate(tokens_of(0, 1, 0), max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=True)
        self.engine.train()
        return list(map(int, found[0]))


def train(case: Case, folder: str) -> Seen:
    """Train ``STEPS`` steps; shorter batches, evaluations, generation, a save and a resume are among and between them. Collective."""
    from torch._dynamo.utils import counters

    reset()
    seen = Seen()
    script = Script(case)
    for step in range(STEPS):
        seen.values += script.train(step, rows=1 if step in (1, 4) else 2)
        if step in (1, 3):
            seen.values.append(script.evaluate(step))
            if case.generates and case.kind != "sp":
                seen.values.append(script.generate())
        if step == 3:
            script.engine.save_checkpoint(folder)
            script.engine.destroy()
            dist.barrier()
            script = Script(case)
            script.engine.load_checkpoint(folder)
        seen.counts.append(counts())
    seen.weights = script.engine._consolidated_16bit_state_dict() or {}
    seen.breaks = {str(reason)[:300]: count for reason, count in counters["graph_break"].items()}
    script.engine.destroy()
    return seen


def both(cases: list[Case], folder: str) -> list[tuple[Seen, Seen]]:
    """Each run without and with compilation."""
    found = []
    for number, case in enumerate(cases):
        plain = train(replace(case, way=""), f"{folder}/{number}/plain")
        found.append((plain, train(case, f"{folder}/{number}/compiled")))
    return found
