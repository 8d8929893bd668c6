"""The parity reference in plain PyTorch, the same training through the engine, and the one checker that compares them.

The reference is a single process with the batches of all ranks and micro-steps. fp32: one forward of their concatenation. 16 bit: one
forward and backward per part in 16 bit, gradients summed in fp32, clipped, torch AdamW on fp32 masters, cast back. A parameter without a
gradient on any rank is not updated in this step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import ranks
from tests.support.models import CASES, Batch, ModelCase, cast_floats, concatenate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Stage 3 would keep such small models whole, so release every block after its forward and shard every parameter.
SMALL_MODEL = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
Feed = Callable[[int, int, int], Batch]  # (step, micro-step, rank) -> batch
Masters = list[dict[str, Tensor]]  # fp32 masters by name, after each step
Forward = Callable[[nn.Module, Batch], Tensor]  # (model or engine, batch) -> loss
MicroStep = Callable[[Any, Batch, Forward, int], float]  # (engine, batch, forward, micro-step) -> loss


@dataclass(frozen=True)
class Run:
    """One training run. ``extra`` is merged into the engine's configuration, one level deep.

    It has two steps, because the second depends on state that the first has left: weights, moments, the order of blocks.
    """

    stage: int = 0
    dtype: str = "fp32"
    accumulation: int = 1
    clip: float = 0.0  # 0: off
    steps: int = 2
    lr: float = 1e-2
    weight_decay: float = 0.05
    # Large against rounding noise in gradients that are zero in exact arithmetic (key biases), small against real gradients.
    eps: float = 1e-3
    scale_power: int = 8  # fp16: initial loss scale 2 ** scale_power
    scale_window: int = 2  # fp16: steps without overflow after which the scale doubles
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """Return the DeepSpeed-style configuration of this run."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, **SMALL_MODEL},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": self.lr, "betas": [0.9, 0.99], "eps": self.eps, "weight_decay": self.weight_decay},
            },
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.dtype == "fp16":
            window = {"initial_scale_power": self.scale_power, "loss_scale_window": self.scale_window, "hysteresis": 1}
            config["fp16"] = {"enabled": True, **window}
        for key, value in self.extra.items():
            if isinstance(value, dict) and isinstance(config.get(key), dict):
                config[key] = {**config[key], **value}
            elif value is None:
                config.pop(key, None)
            else:
                config[key] = value
        return config


@dataclass
class Trace:
    """Results of a run: per step the mean loss and the norm before clipping, at the end the weights by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)  # in the dtype of the forward
    masters: dict[str, Tensor] = field(default_factory=dict)  # fp32, trainable parameters only
    history: list[dict[str, Tensor]] = field(default_factory=list)  # 16 bit: masters after every step
    skipped: list[bool] = field(default_factory=list)  # fp16: the step found a non-finite gradient


@dataclass(frozen=True)
class Difference:
    """Largest relative differences between two traces; ``masters`` after every step in 16 bit, after the last in fp32."""

    loss: float
    norm: float
    weights: float
    masters: float

    def within(self, limit: Difference) -> bool:
        return all(getattr(self, name) <= getattr(limit, name) for name in vars(limit))


# [Note: parity in 16 bit] Both sides compute the same 16-bit gradients and sum them in fp32, so one step agrees like fp32. But a master
# next to a rounding boundary may change its 16-bit copy by one unit in the last place, and from then on the runs drift apart. A reference
# that can `follow` takes over the engine's masters after each step, so that every step starts from the same weights; its moments stay its
# own. The remaining difference is a kernel that sums in another order because a weight has another address, and so rounds single 16-bit
# numbers the other way. The last place of one gradient moves its master by that fraction of lr, which `masters` allows. The norm is hardly
# affected by it, but it is affected by a rounding of all gradients.
LIMITS = {
    "fp32": Difference(loss=2e-6, norm=2e-5, weights=2e-5, masters=2e-5),
    "bf16": Difference(loss=1e-3, norm=2e-4, weights=2**-7, masters=2**-7),
    "fp16": Difference(loss=1e-4, norm=5e-5, weights=2**-10, masters=2**-10),
}
# Effect of a few units in the last place of bf16 within three steps, for runs that cannot be followed.
DRIFT = Difference(loss=1e-3, norm=5e-3, weights=2**-6, masters=8e-3)


# ------------------------------------------------------------------------------------------------ reference


def reference(model: nn.Module, feed: Feed, forward: Forward, run: Run, world: int, follow: Masters | None = None) -> Trace:
    """Train ``model`` in one process on the parts of ``world`` ranks, weights in ``run.dtype``, masters in fp32.

    ``follow``: masters to continue from after each step; see [Note: parity in 16 bit].
    """
    dtype = DTYPES[run.dtype]
    cast_model(model.to(ranks.device()), dtype, run.extra.get("data_types", {}).get("keep_in_fp32_modules", ()))
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    masters = {name: parameter.detach().float().clone() for name, parameter in trainable.items()}
    settings = {"lr": run.lr, "betas": (0.9, 0.99), "eps": run.eps, "weight_decay": run.weight_decay}
    optimizer = torch.optim.AdamW(list(masters.values()), foreach=False, fused=False, **settings)
    scaler = ReferenceScaler(2.0**run.scale_power, run.scale_window) if run.dtype == "fp16" else None
    trace = Trace()
    for step in range(run.steps):
        scale = scaler.scale if scaler else 1.0
        parts = [(micro, rank) for micro in range(run.accumulation) for rank in range(world)]
        sums: dict[str, Tensor] = {}
        losses = [
            backward_part(model, forward, prepare(feed(step, micro, rank), dtype), scale / run.accumulation, trainable, sums)
            for micro, rank in parts
        ]
        trace.losses.append(math.fsum(losses) / len(losses))
        for total in sums.values():
            total /= world * scale
        reference_step(masters, sums, optimizer, run.clip, trace, scaler)
        if run.dtype != "fp32":
            trace.history.append({name: master.detach().clone().cpu() for name, master in masters.items()})
        with torch.no_grad():
            for name, parameter in trainable.items():
                if follow is not None:
                    masters[name].copy_(follow[step][name])
                parameter.copy_(masters[name])
    trace.weights = {name: value_of(parameter) for name, parameter in model.named_parameters()}
    trace.masters = {name: master.cpu() for name, master in masters.items()}
    return trace


def prepare(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch on the model's device and in its dtype."""
    return {name: value.to(ranks.device()) for name, value in cast_floats(batch, dtype).items()}


def backward_part(
    model: nn.Module, forward: Forward, batch: Batch, factor: float, trainable: dict[str, nn.Parameter], sums: dict[str, Tensor]
) -> float:
    """Run forward and backward of one rank's micro-step in the model's dtype; add its gradients to fp32 ``sums``, which has an entry for
    each parameter with a gradient. Return the loss.
    """
    loss = forward(model, batch)
    (loss * factor).backward()
    for name, parameter in trainable.items():
        if parameter.grad is not None:
            sums[name] = sums[name] + parameter.grad.float() if name in sums else parameter.grad.float()
            parameter.grad = None
    return loss.item()


def reference_step(
    masters: dict[str, Tensor],
    gradients: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    clip: float,
    trace: Trace,
    scaler: ReferenceScaler | None,
) -> None:
    """Compute the norm, clip, and update the masters, unless a gradient is not finite."""
    # In fp64: torch's own sum of a million squares in fp32 is off by 5e-5.
    norm = torch.linalg.vector_norm(torch.stack([gradient.double().norm() for gradient in gradients.values()]))
    overflow = scaler is not None and not bool(torch.isfinite(norm))
    trace.norms.append(norm.item())
    trace.skipped.append(overflow)
    if scaler is not None:
        scaler.update(overflow)
    if overflow:
        return
    factor = min(1.0, clip / (norm.item() + 1e-6)) if clip else 1.0
    for name, master in masters.items():
        master.grad = gradients[name] * factor if name in gradients else None
    optimizer.step()


class ReferenceScaler:
    """Dynamic loss scale: half on overflow, double after ``window`` steps without one (counted from the start or the overflow)."""

    def __init__(self, scale: float, window: int) -> None:
        self.scale = scale
        self.window = window
        self.steps = 0
        self.last_overflow = -1

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.scale / 2, 1.0)
            self.last_overflow = self.steps
        elif (self.steps - self.last_overflow) % self.window == 0:
            self.scale *= 2
        self.steps += 1


def concatenated_reference(case: ModelCase, run: Run, world: int, rows: int = 2) -> Trace:
    """Train in fp32 with one forward per step on the joined batch of all ranks and micro-steps."""
    whole = Run(**{**vars(run), "accumulation": 1})

    def feed(step: int, _micro: int, _rank: int) -> Batch:
        parts = [case.rows(step, micro, rank, rows=rows) for micro in range(run.accumulation) for rank in range(world)]
        return concatenate(parts)

    return reference(case.build(), feed, case.forward, whole, world=1)


def cast_model(model: nn.Module, dtype: torch.dtype, kept: Sequence[str] = ()) -> nn.Module:
    """Cast parameters in place, except those whose names have one of ``kept``, or are on the model's own fp32 lists; buffers stay."""
    for listed in ("_keep_in_fp32_modules_strict", *["_keep_in_fp32_modules"] * (dtype == torch.float16)):
        kept = [*kept, *(getattr(model, listed, None) or ())]
    for name, parameter in model.named_parameters():
        if any(part in name for part in kept):
            continue
        if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):  # bitsandbytes stores packed bytes in a floating dtype
            parameter.data = parameter.data.to(dtype)
    return model


# ------------------------------------------------------------------------------------------------ engine


def initialize(model: nn.Module, run: Run, **arguments: Any) -> Any:
    """Return the engine that ``hf_zero.initialize`` builds for this run (the optimizer from the configuration)."""
    import hf_zero

    arguments.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
    config = run.config()
    if arguments.get("optimizer") is not None:
        del config["optimizer"]
    return hf_zero.initialize(model=model.to(ranks.device()), config=config, **arguments)[0]


def micro_step(engine: Any, batch: Batch, forward: Forward, _micro: int) -> float:
    """Run forward, backward and ``step`` for one micro-step: the engine counts."""
    loss = forward(engine, batch)
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(engine: Any, feed: Feed, forward: Forward, run: Run, micro_step: MicroStep = micro_step) -> Trace:
    """Train through the engine on this rank's parts. Collective; every rank returns the same losses and norms."""
    trace = Trace()
    dtype = DTYPES[run.dtype]
    losses: list[list[float]] = []
    for step in range(run.steps):
        losses.append([])
        for micro in range(run.accumulation):
            batch = prepare(feed(step, micro, ranks.rank()), dtype)
            losses[-1].append(micro_step(engine, batch, forward, micro))
        trace.norms.append(as_float(engine.get_global_grad_norm()))
        trace.skipped.append(bool(engine.optimizer.overflow))
        if run.dtype != "fp32":
            trace.history.append(full_masters(engine))
    everyone: list[list[list[float]]] = [[] for _ in range(ranks.world())]
    dist.all_gather_object(everyone, losses)  # once, at the end, because it would synchronise the ranks in between
    trace.losses = [_mean([loss for mine in everyone for loss in mine[step]]) for step in range(run.steps)]
    return collect(engine, trace)


def collect(engine: Any, trace: Trace) -> Trace:
    """Fill in the gathered weights and fp32 masters. Collective."""
    import hf_zero

    named = list(engine.module.named_parameters())
    with hf_zero.zero.GatheredParameters([parameter for _, parameter in named]):
        trace.weights = {name: whole_value(parameter, value_of(parameter)) for name, parameter in named}
    trace.masters = trace.history[-1] if trace.history else full_masters(engine)
    return trace


def value_of(parameter: nn.Parameter) -> Tensor:
    """Return a copy on the host; for a weight packed by bitsandbytes its bytes, which may be NaN as numbers."""
    value = parameter.detach().clone().cpu()
    return value.view(torch.uint8) if hasattr(parameter, "quant_state") else value


def full_masters(engine: Any) -> dict[str, Tensor]:
    """Return the whole fp32 masters of the trainable parameters. Collective."""
    from hf_zero.utils import safe_get_full_fp32_param

    trainable = [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    return {name: safe_get_full_fp32_param(parameter).detach().clone().cpu() for name, parameter in trainable}


def whole_value(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return ``value``, joined over ranks if it is of this rank's experts or of its part of a layer. Collective."""
    from hf_zero.core.units.marks import tp_shard_of

    part = tp_shard_of(parameter)
    if part is None:
        return value
    whole = value.new_full(part.full_shape, math.nan)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, ([(found.start, found.stop) for found in part.ranges], value))
    for ranges, values in parts:
        first = 0
        for start, stop in ranges:
            whole.narrow(part.dim, start, stop - start).copy_(values.narrow(part.dim, first, stop - start))
            first += stop - start
    return whole


def mean_over_ranks(values: list[float]) -> float:
    """Return the mean of the values of all ranks, the same number on every rank."""
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, values)
    return _mean([value for part in gathered for value in part])


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def as_float(norm: Any) -> float:
    """Return a grad norm, a float or 0-dim tensor, as float; fail for None, which means that the engine has no norm."""
    if norm is None:
        raise AssertionError("get_global_grad_norm() returned None after a step")
    return float(norm)


# ------------------------------------------------------------------------------------------------ checker


def difference(trace: Trace, expected: Trace) -> Difference:
    """Return the largest relative differences. A weight's is relative to the largest element of its tensor, at least 0.01."""
    for name in ("losses", "norms"):
        if len(getattr(trace, name)) != len(getattr(expected, name)):
            raise AssertionError(f"{len(getattr(trace, name))} {name}, expected {len(getattr(expected, name))}")
    steps = zip(trace.history or [trace.masters], expected.history or [expected.masters], strict=True)
    return Difference(
        loss=_relative(trace.losses, expected.losses),
        norm=_relative(trace.norms, expected.norms),
        weights=_weights(trace.weights, expected.weights),
        masters=max(_weights(mine, theirs) for mine, theirs in steps),
    )


def check(trace: Trace, expected: Trace | Callable[..., Trace], run: Run, label: str = "", limit: Difference | None = None) -> Difference:
    """Compare with the reference; return the differences, raise an AssertionError that shows both traces.

    ``expected`` is a trace, or a function that trains the reference and takes ``follow``: it is called again with the engine's masters
    when a 16-bit run has drifted.
    """
    limit = limit or limits_of(run)
    wanted = expected() if callable(expected) else expected
    found = difference(trace, wanted)
    if callable(expected) and trace.history and not found.within(limit):
        wanted = expected(follow=trace.history)
        found = difference(trace, wanted)
    if trace.skipped != wanted.skipped or not found.within(limit):
        raise AssertionError(
            f"{label} stage {run.stage} {run.dtype} accumulation {run.accumulation} clip {run.clip}: {found}, allowed {limit}\n"
            f"losses   {trace.losses}\nexpected {wanted.losses}\nnorms    {trace.norms}\nexpected {wanted.norms}\n"
            f"skipped  {trace.skipped}\nexpected {wanted.skipped}\n{_worst(trace, wanted)}"
        )
    _check_copies(trace, label)
    return found


def limits_of(run: Run) -> Difference:
    """Return ``LIMITS``; wider where ranks' 16-bit gradients are summed in 16 bit, which rounds each sum: on nccl, unlike hf_zero's own
    exchange, and where the sums of shard groups or nodes are sent in 16 bit."""
    limit, dtype = LIMITS[run.dtype], run.dtype
    sums_travel = "mics_shard_size" in run.extra.get("zero_optimization", {}) or "param_shard_size" in run.extra.get("hf_zero", {})
    if dtype == "fp32" or not dist.is_initialized() or dist.get_world_size() == 1 or (dist.get_backend() == "gloo" and not sums_travel):
        return limit
    return Difference(loss=limit.loss, norm=5 * limit.norm, weights=4 * limit.weights, masters=4 * limit.masters)


def check_bitwise(trace: Trace, expected: Trace, label: str = "") -> None:
    """Raise unless losses, norms and weights are equal bit for bit."""
    if trace.losses != expected.losses or trace.norms != expected.norms:
        raise AssertionError(
            f"{label}: not bitwise equal\nlosses {trace.losses}\n   and {expected.losses}\nnorms {trace.norms}\n  and {expected.norms}"
        )
    different = [name for name, weight in trace.weights.items() if not torch.equal(weight, expected.weights[name])]
    if different:
        raise AssertionError(f"{label}: weights not bitwise equal: {different}")


def check_training(
    build: Callable[[], nn.Module],
    feed: Feed,
    forward: Forward,
    run: Run,
    *,
    micro_step: MicroStep = micro_step,
    label: str = "",
    limit: Difference | None = None,
    **arguments: Any,
) -> Trace:
    """Train a model through the engine and, on rank 0, compare with the reference that runs the same parts one by one.

    ``limit`` None selects the limit for ``run``; ``arguments`` are passed to ``hf_zero.initialize``, where a callable value is first called
    with the model (for example to make an optimizer).
    """
    model = build()
    arguments = {name: value(model) if callable(value) else value for name, value in arguments.items()}
    engine = initialize(model, run, **arguments)
    trace = train(engine, feed, forward, run, micro_step)
    engine.destroy()
    if ranks.rank() == 0:
        check(trace, lambda follow=None: reference(build(), feed, forward, run, ranks.world(), follow), run, label, limit)
    return trace


def check_case(name: str, run: Run, rows: int = 2, expected: Trace | None = None) -> tuple[Trace, Difference | None]:
    """Train a case of ``tests.support.models`` through the engine; rank 0 compares it with the reference."""
    case = CASES[name]

    def feed(step: int, micro: int, rank: int) -> Batch:
        return case.rows(step, micro, rank, rows=rows)

    engine = initialize(case.build(), run)
    trace = train(engine, feed, case.forward, run)
    engine.destroy()
    if ranks.rank() != 0:
        return trace, None

    def train_reference(follow: Masters | None = None) -> Trace:
        return expected if expected and follow is None else reference_case(name, run, ranks.world(), rows, follow)

    return trace, check(trace, train_reference, run, label=name)


def reference_case(name: str, run: Run, world: int, rows: int = 2, follow: Masters | None = None) -> Trace:
    """Return the reference of a case: concatenated in fp32, part by part in 16 bit, like 16-bit ranks."""
    case = CASES[name]
    if run.dtype == "fp32":
        return concatenated_reference(case, run, world, rows)

    def feed(step: int, micro: int, rank: int) -> Batch:
        return case.rows(step, micro, rank, rows=rows)

    return reference(case.build(), feed, case.forward, run, world, follow)


def _relative(values: list[float], expected: list[float]) -> float:
    worst = 0.0
    for value, wanted in zip(values, expected, strict=True):
        if not math.isfinite(wanted):
            worst = max(worst, 0.0 if not math.isfinite(value) else math.inf)
        else:
            worst = max(worst, abs(value - wanted) / max(abs(wanted), 1e-12))
    return worst


def _weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    if weights.keys() != expected.keys():
        raise AssertionError(f"names differ: {sorted(weights.keys() ^ expected.keys())}")
    return max((_tensor(weights[name], expected[name], name) for name in weights), default=0.0)


def _tensor(value: Tensor, expected: Tensor, name: str) -> float:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        raise AssertionError(f"{name}: {value.dtype} {tuple(value.shape)}, expected {expected.dtype} {tuple(expected.shape)}")
    if value.numel() == 0:
        return 0.0
    worst = (value.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=0.01)
    return worst.item() if torch.isfinite(worst) else math.inf


def _worst(trace: Trace, expected: Trace) -> str:
    lines = []
    steps = zip(trace.history or [trace.masters], expected.history or [expected.masters], strict=True)
    for step, (mine, theirs) in enumerate(steps):
        per_name = {name: _tensor(mine[name], theirs[name], name) for name in mine}
        worst = sorted(per_name.items(), key=lambda item: -item[1])[:5]
        lines.append(f"worst masters {step}: " + ", ".join(f"{name} {value:.2e}" for name, value in worst))
    return "\n".join(lines)


def _check_copies(trace: Trace, label: str) -> None:
    """Raise unless each weight of the forward is its master, cast."""
    for name, master in trace.masters.items():
        if not torch.equal(master.to(trace.weights[name].dtype), trace.weights[name]):
            raise AssertionError(f"{label}: the weight of {name} is not its fp32 master cast to {trace.weights[name].dtype}")
