"""1-bit Adam (Tang et al., arXiv 2102.02888): Adam during the warm-up, then momentum over a frozen variance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_zero.errors import ConfigError, StateError
from hf_zero.native.chunks import MoveRule
from hf_zero.native.codes import move
from hf_zero.ops.foreach import buckets
from hf_zero.optim.keywords import number

# Checks of the variance per 1 / (1 - beta2) steps with freeze_step "auto".
_LOOKS = 16
# Change of the variance's 1-norm over 1 / (1 - beta2) steps below which it counts as stable (the paper's threshold).
_STABLE_RATIO = 0.96
# accelerate takes "auto" in a configuration for a gap that it must fill, and raises where it has no value to fill in.
BY_ITSELF = ("auto", "stable")


class OneBitAdam(torch.optim.AdamW):
    """Adam whose momentum is sent as one bit per number once its variance is frozen.

    This class holds hyper-parameters and arithmetic; pass it to ``hf_zero.initialize``, whose engine communicates. For ``freeze_step``
    steps it is AdamW, bit for bit. From then on the second moment stays constant, each rank adds its own gradient to the common momentum,
    and the engine averages the results in compressed form.

    Args:
        params: Parameters or group dicts.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled, in both phases.
        freeze_step: Steps of warm-up, at least 1. "auto" (or "stable") ends the warm-up when the 1-norm of the second moment has changed by
            less than 4 % within ``1 / (1 - beta2)`` steps and the learning rate is not rising.
        bias_correction: Divide the moments by ``1 - beta ** step``; after the freeze the second one keeps its last divisor.
        eps_inside_sqrt: Add ``eps`` under the root.
        max_grad_norm: Clip gradients to this norm; 0 is off. The same as ``gradient_clipping`` of the configuration.
        amsgrad: Must be False.
        cuda_aware: Ignored; the process group's back end decides.
        comm_backend_name: Ignored; the process group's back end decides.
        foreach: As in torch's AdamW, for the warm-up.
        fused: As in torch's AdamW, for the warm-up.

    Raises:
        ConfigError: ``freeze_step`` is neither a number of steps nor "auto", ``amsgrad`` is set, or ``max_grad_norm`` is negative.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int | str = 100000,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if amsgrad:
            raise ConfigError("OneBitAdam: amsgrad is True; the frozen variance has no maximum to follow, leave it out")
        if max_grad_norm < 0:
            raise ConfigError(f"OneBitAdam: max_grad_norm is {max_grad_norm!r}; a norm of at least 0 is expected (0: off)")
        self.max_grad_norm = float(max_grad_norm)
        plain = bias_correction and not eps_inside_sqrt
        super().__init__(params, lr, betas, eps, weight_decay, foreach=foreach, fused=fused if plain else None)
        own: dict[str, Any] = {
            "freeze_step": _checked_freeze_step(freeze_step),
            "bias_correction": bool(bias_correction),
            "eps_inside_sqrt": bool(eps_inside_sqrt),
            "step_count": 0,
            "frozen_at": None,
            "variance_norms": [],
        }
        self.defaults.update(own)
        for group in self.param_groups:
            for name, value in own.items():
                group.setdefault(name, list(value) if isinstance(value, list) else value)

    @property
    def frozen_at(self) -> int | None:
        """Return the last step of the warm-up; None during the warm-up."""
        return self.param_groups[0]["frozen_at"] if self.param_groups else None

    @property
    def adam_freeze_key(self) -> bool:
        """Return whether the warm-up is over; DeepSpeed's name for it."""
        return self.frozen_at is not None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of the warm-up, which is AdamW's.

        Raises:
            StateError: The warm-up is over; later steps need an engine.
        """
        if self.frozen_at is not None:
            raise StateError(
                f"OneBitAdam ended its warm-up at step {self.frozen_at}; its momentum is now averaged over ranks by the engine. Pass the "
                "optimizer to hf_zero.initialize() and call engine.step()"
            )
        loss: float | None = None
        if all(group["bias_correction"] and not group["eps_inside_sqrt"] for group in self.param_groups):
            loss = super().step(closure)
        else:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step_variant()
        for group in self.param_groups:
            group["step_count"] = int(group["step_count"]) + 1
        return loss

    def _step_variant(self) -> None:
        """Run a warm-up step of the variants that torch's AdamW does not have."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for params, grads, (firsts, seconds) in buckets(self, group, ("exp_avg", "exp_avg_sq")):
                torch._foreach_lerp_(firsts, grads, 1 - beta1)
                torch._foreach_mul_(seconds, beta2)
                torch._foreach_addcmul_(seconds, grads, grads, value=1 - beta2)
                for param, first, second in zip(params, firsts, seconds, strict=True):
                    state = self.state[param]
                    step = int(state.get("step", 0)) + 1
                    state["step"] = torch.tensor(float(step), dtype=torch.float32)
                    move(param.data, first, second, move_rule(group, step, step))

    # -- when the warm-up ends ------------------------------------------------------------------------------------------

    @property
    def freezes_by_itself(self) -> bool:
        """Return whether ``freeze_step`` is "auto", so that the optimizer itself decides when the warm-up ends."""
        return bool(self.param_groups) and self.param_groups[0]["freeze_step"] == "auto"

    def steps_taken(self) -> int:
        """Return the number of updates so far, including those of another Adam from a checkpoint."""
        counted = max((int(group["step_count"]) for group in self.param_groups), default=0)
        return max([counted, *(int(state["step"]) for state in self.state.values() if "step" in state)])

    def look_interval(self) -> int:
        """Return the number of steps between two checks of the variance."""
        return max(1, _window(self.param_groups[0]) // _LOOKS)

    def note_variance(self, norm: float, rate: float) -> float | None:
        """Record the 1-norm of the variance and the learning rate; call every ``look_interval`` steps, with equal values on all ranks.

        Returns:
            The change of the norm within ``1 / (1 - beta2)`` steps, as a factor below 1, if it is small enough to freeze the variance; else
            None.
        """
        group = self.param_groups[0]
        looks = max(1, _window(group) // self.look_interval())
        known: list[list[float]] = list(group["variance_norms"])
        known = [*known, [norm, rate]][-(looks + 1) :]
        for each in self.param_groups:
            each["variance_norms"] = known
        if len(known) <= looks:
            return None
        former, rising = known[0][0], rate > known[-2][1]
        ratio = min(norm, former) / max(norm, former) if norm > 0 and former > 0 else 0.0
        return ratio if ratio >= _STABLE_RATIO and not rising else None

    def freeze(self) -> None:
        """End the warm-up with the present step."""
        step = self.steps_taken()
        for group in self.param_groups:
            group["frozen_at"], group["variance_norms"] = step, []


def _window(group: dict[str, Any]) -> int:
    """Return the number of steps that the second moment averages over: ``1 / (1 - beta2)``."""
    return max(1, round(1 / (1 - float(group["betas"][1]))))


def _checked_freeze_step(value: int | str) -> int | str:
    if value in BY_ITSELF:
        return "auto"
    steps = number("optimizer.params.freeze_step", value)
    if steps != int(steps) or steps < 1:
        raise ConfigError(
            f"optimizer.params.freeze_step is {value!r}; allowed are a number of steps of at least 1, and 'auto': the frozen "
            "variance is estimated in these warm-up steps"
        )
    return int(steps)


def move_rule(group: dict[str, Any], step: int, second_step: int) -> MoveRule:
    """Return the numbers of ``param -= lr * first / (sqrt(second) + eps)`` with decay and bias correction.

    Args:
        group: Hyper-parameters.
        step: Number of this step, from 1, for the correction of the momentum.
        second_step: Steps that the variance has seen, for its correction.
    """
    rate, (beta1, beta2) = float(group["lr"]), group["betas"]
    corrected = group["bias_correction"]
    return MoveRule(
        decay=1 - rate * group["weight_decay"] if group["weight_decay"] else 1.0,
        variance_divisor=1 - beta2**second_step if corrected else 1.0,
        eps=group["eps"],
        minus_step=-rate / (1 - beta1**step if corrected else 1.0),
        eps_inside=group["eps_inside_sqrt"],
    )
