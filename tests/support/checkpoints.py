"""A model with everything a checkpoint must hold, engines over it, and the full state of an engine by parameter name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.convert.native import read_checkpoint
from hf_zero.checkpoint.files.rows import Elsewhere
from tests.support import ranks
from tests.support.models import CLASSES, LENGTH, Batch, Block, class_loss
from tests.support.parity import DTYPES, mean_over_ranks

IN_BACKGROUND = {"checkpoint": {"writer": {"decoupled": True}}}


class Sample(nn.Module):
    """Model with blocks, tied weights, a frozen layer, an integer parameter, buffers, odd sizes, a parameter without elements."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.entry = nn.Linear(LENGTH, width)
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)
        self.twin = nn.Linear(width, CLASSES)
        self.twin.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.empty(0))
        self.table = nn.Parameter(torch.randint(0, 9, (3,)), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.randn(width))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        hidden = self.entry(inputs) + self.shift.to(inputs.dtype)
        hidden = hidden + self.frozen(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return (self.head(hidden) + self.twin(hidden)) * self.scale + self.nothing.sum()


def build(seed: int = 0) -> Sample:
    """Return the model, with weights, buffers and table that depend on ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Sample().train()


def config(stage: int, dtype: str, **extra: Any) -> dict[str, Any]:
    """Return a configuration with a schedule and, in fp16, a dynamic loss scale that changes."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 20}},
        **extra,
    }
    if dtype != "fp32":
        made[dtype] = {"enabled": True}
    if dtype == "fp16":
        made["fp16"].update({"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1})
    return made


def groups(model: nn.Module, reverse: bool = False) -> list[dict[str, Any]]:
    """Return decayed and undecayed parameters, as most training scripts divide them."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    made = [
        {"params": [param for param in trainable if param.ndim > 1], "weight_decay": 0.1, "lr": 0.01},
        {"params": [param for param in trainable if param.ndim <= 1], "weight_decay": 0.0, "lr": 0.03},
    ]
    return made[::-1] if reverse else made


@contextmanager
def on_node(folder: str, per_node: int, turned: bool = False) -> Iterator[Path]:
    """Work in the folder of this rank's node inside the context; with ``turned`` in the folder of the next node."""
    before, local = Path.cwd(), os.environ["LOCAL_RANK"]
    node = (ranks.rank() // per_node + turned) % 2
    place = Path(folder, f"node{node}")
    place.mkdir(exist_ok=True)
    os.chdir(place)
    os.environ["LOCAL_RANK"] = str(ranks.rank() % per_node)
    try:
        yield place
    finally:
        os.chdir(before)
        os.environ["LOCAL_RANK"] = local


def start(stage: int, dtype: str = "fp32", seed: int = 0, optimizer: Any = torch.optim.AdamW, reverse: bool = False, **extra: Any) -> Any:
    """Return an engine over a new model."""
    import hf_zero

    model = build(seed)
    own: dict[Any, dict[str, Any]] = {torch.optim.AdamW: {"betas": (0.9, 0.98)}, torch.optim.Adafactor: {}}
    client = optimizer(groups(model, reverse), lr=0.01, **own.get(optimizer, {"momentum": 0.9}))
    return hf_zero.initialize(model=model, optimizer=client, config=config(stage, dtype, **extra))[0]


def steps(engine: Any, first: int, count: int, dtype: str = "fp32", same_on_all: bool = False) -> list[tuple[float, float]]:
    """Train ``count`` steps; return (mean loss, norm) per step."""
    seen = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + (0 if same_on_all else ranks.rank()))
        batch: Batch = {
            "inputs": torch.randn(2, LENGTH, generator=generator).to(ranks.device(), DTYPES[dtype]),
            "labels": torch.randint(0, CLASSES, (2,), generator=generator).to(ranks.device()),
        }
        loss = class_loss(engine, batch)
        engine.backward(loss)
        engine.step()
        seen.append((mean_over_ranks([loss.item()]), float(engine.get_global_grad_norm())))
    return seen


STATES = {"exp_avg", "exp_avg_sq", "momentum_buffer", "row_var", "col_var", "variance"}


def full_state(engine: Any) -> dict[str, Any]:
    """Return everything a checkpoint must carry over, whole, by name. Collective; the same on every rank."""
    import hf_zero

    state: dict[str, Any] = {}
    named = list(engine.module.named_parameters())
    with hf_zero.zero.GatheredParameters([param for _, param in named]):
        state.update({f"weight {name}": param.detach().clone() for name, param in named})
    state.update({f"buffer {name}": buffer.clone() for name, buffer in engine.module.named_buffers() if name != "scratch"})
    kept = engine.collectives.gather_objects({key for values in engine.optimizer.inner.state.values() for key in values}, "test")
    asked = sorted(set().union(*kept) & STATES)  # each costs a vote per parameter
    for name, param in named:
        if param.requires_grad and param.is_floating_point():
            state[f"master {name}"] = hf_zero.utils.safe_get_full_fp32_param(param)
            for key in asked:
                value = hf_zero.utils.safe_get_full_optimizer_state(param, key)
                if value is not None and value.numel():
                    state[f"{key} {name}"] = value
    for segment in engine.optimizer.segments:
        for slot in segment.unit.layout.slots:
            if slot.group == segment.group and slot.range.intersect(segment.range.shift(segment.unit.owned.start)).numel:
                number = engine.optimizer.inner.state[segment.tensor].get("step")
                state[f"step {slot.name}"] = None if number is None else float(number)
    gathered: list[dict[str, Any]] = engine.collectives.gather_objects({k: v for k, v in state.items() if k.startswith("step ")}, "test")
    for part in gathered:
        state.update(part)
    for group in engine.optimizer.param_groups:
        decay = "decayed" if group["weight_decay"] else "plain"
        state[f"group {decay}"] = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
    state = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
    state["scheduler"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    state["scaler"] = engine.scaler.state_dict()
    state["counters"] = (engine.global_steps, engine.skipped_steps, engine.micro_steps)
    return state


def differences(state: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of entries that are not equal bit for bit."""
    found = sorted(state.keys() ^ expected.keys())
    for name in state.keys() & expected.keys():
        mine, other = state[name], expected[name]
        tensors = isinstance(mine, Tensor) and isinstance(other, Tensor)
        if not (torch.equal(mine, other) and mine.dtype == other.dtype if tensors else mine == other):
            found.append(name)
    return found


def write_index(folder: Path, text: str) -> None:
    (folder / "index.json").write_text(text, encoding="utf-8")
    (folder / "complete").write_text(hashlib.sha256((folder / "index.json").read_bytes()).hexdigest() + "\n")


def contents_of(folder: Path) -> dict[str, Tensor]:
    """Return every parameter and optimizer state of the checkpoint ``t`` in ``folder``, whole."""
    found: dict[str, Tensor] = {}
    for param in read_checkpoint(folder / "t").params:
        rows: dict[str, Elsewhere] = {"value": param.value.row, **param.states}
        found.update({f"{kind} {param.name}": row.fetch().view(param.value.shape) for kind, row in rows.items()})
        found.update({f"{kind} {param.name}": torch.as_tensor(number) for kind, number in param.numbers.items()})
    return found
