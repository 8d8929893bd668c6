"""The optimizer object of users of 1-bit Adam: plain updates in the warm-up, then compressed averages of the momentum."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.optimizer.state_store import scale_
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import publish
from hf_zero.errors import UnsupportedError
from hf_zero.observe import log_rank0, span
from hf_zero.onebit.unit import CompressedUnit
from hf_zero.optim.onebit_adam import OneBitAdam

WORKER_ERROR, SERVER_ERROR = "onebit_worker_error", "onebit_server_error"


class OneBitSharded(ShardedOptimizer):
    """``ShardedOptimizer`` over a ``OneBitAdam``.

    In the warm-up it gets reduced gradients, like every optimizer. In the compressed phase it gets this rank's own unsharded gradients and
    sends the momentum itself.

    Args:
        inner: Optimizer with the hyper-parameters and the arithmetic.
        units: Trainable units.
        collectives: The axis over whose ranks the momentum is averaged.
    """

    adapts = False

    def __init__(self, inner: OneBitAdam, units: Sequence[Unit], collectives: Collectives) -> None:
        super().__init__(inner, units)
        self.one_bit = inner
        self._collectives = collectives
        self._compressed: list[CompressedUnit] | None = None  # made by the first compressed step, and again after a load
        self._loaded: dict[str, Mapping[str, torch.Tensor]] = {}  # errors from a checkpoint, until they are needed
        for unit in self.units:
            if unit.master is not None and unit.master.dtype != torch.float32:
                raise UnsupportedError(
                    f"OneBitAdam needs fp32 masters, but the master of unit {unit.name} is {unit.master.dtype}: leave "
                    "bf16_master_weights_and_grads and fp16_master_weights_and_grads at false"
                )

    def rest(self, resting: Mapping[int, Collection[int]], unreduced: Collection[int]) -> None:
        """Refuse to leave parameters out of updates: codes and errors are laid out for all parameters.

        Raises:
            UnsupportedError: A parameter was frozen after ``initialize``.
        """
        names = [unit.layout.slots[index].name for unit in self.units for index in resting.get(id(unit), ())]
        if names:
            raise UnsupportedError(
                f"{', '.join(names[:5])}: frozen after initialize(), which OneBitAdam does not provide. Freeze before initialize(), or use "
                "Adam"
            )

    def extend(self, units: Sequence[Unit]) -> None:
        """Refuse further parameters: codes and errors are laid out for the present ones.

        Raises:
            UnsupportedError: Always.
        """
        names = [slot.name for unit in units for slot in unit.layout.slots]
        raise UnsupportedError(
            f"{', '.join(names[:5])}: unfrozen or added after initialize(), which OneBitAdam does not provide. Let them require a gradient "
            "before initialize(), or use Adam"
        )

    @property
    def compresses(self) -> bool:
        """Return whether the coming step belongs to the compressed phase."""
        return self.one_bit.frozen_at is not None

    def update(self, shards: Sequence[torch.Tensor], factor: torch.Tensor, updated: Callable[[Unit], None]) -> None:
        """Update masters and shards once; collective in the compressed phase.

        Args:
            shards: Warm-up: reduced gradients, (shard_numel,) per unit. Compressed phase: this rank's own, (padded_numel,) per unit.
            factor: 0-dim factor by which the gradients are multiplied first.
            updated: Function that is called with each unit, in order, when its shard has its new value.
        """
        if self.compresses:
            scale_(shards, factor)
            self._update_compressed(shards)
            for unit in self.units:
                publish([unit])
                updated(unit)
            return
        super().update(shards, factor, updated)
        if self._is_over():
            self.one_bit.freeze()

    def _is_over(self) -> bool:
        """Return whether the step just taken ended the warm-up; the same on all ranks, collective with "auto"."""
        steps = self.one_bit.steps_taken()
        if not self.one_bit.freezes_by_itself:
            limit = int(self.one_bit.param_groups[0]["freeze_step"])
            if steps >= limit:
                log_rank0("1-bit Adam: warm-up of %d steps is over, momentum is compressed from now on", steps)
            return steps >= limit
        if steps % self.one_bit.look_interval():
            return False
        norm = torch.zeros((), dtype=torch.float64, device=self._collectives.topology.device)
        for segment in self.segments:
            norm += self.one_bit.state[segment.tensor]["exp_avg_sq"].sum(dtype=torch.float64)
        # Summed over ranks even if all hold the same values: all ranks must take the same decision.
        self._collectives.all_reduce(norm, "norm of the variance").wait()
        ratio = self.one_bit.note_variance(float(norm), float(self.one_bit.param_groups[0]["lr"]))
        if ratio is not None:
            log_rank0(
                "1-bit Adam: the variance is stable after step %d (its norm changed by a factor of %.4f in %d steps), momentum is "
                "compressed from now on",
                steps,
                ratio,
                round(1 / (1 - self.one_bit.param_groups[0]["betas"][1])),
            )
        return ratio is not None

    # -- compressed phase -------------------------------------------------------------------------------------------------

    def _update_compressed(self, grads: Sequence[torch.Tensor]) -> None:
        """Update in three phases per unit, with each unit's messages sent while the next one is encoded."""
        units, step = self._units(), self.one_bit.steps_taken() + 1
        scattering: deque[tuple[CompressedUnit, Pending]] = deque()
        averages: deque[tuple[CompressedUnit, Pending, torch.Tensor]] = deque()

        def serve() -> None:
            compressed, pending = scattering.popleft()
            pending.wait()
            name = compressed.unit.name
            if pending.result is not None:
                with span("average", name):
                    message = compressed.serve(pending.result)
                full = message.new_empty(self._collectives.world * message.numel())
                averages.append((compressed, self._collectives.all_gather(full, message, f"{name}: momentum"), full))

        def finish() -> None:
            compressed, pending, full = averages.popleft()
            pending.wait()
            with span("move", compressed.unit.name):
                compressed.finish(full.view(self._collectives.world, -1), step)

        with torch.no_grad():
            for compressed, grad in zip(units, grads, strict=True):
                with span("pack", compressed.unit.name):
                    messages = compressed.pack(grad if grad.dtype == torch.float32 else grad.float())
                scattering.append((compressed, self._collectives.exchange(messages, f"{compressed.unit.name}: momentum")))
                if len(scattering) > 1:
                    serve()
                if len(averages) > 1:
                    finish()
            while scattering:
                serve()
            while averages:
                finish()
        for group in self.param_groups:
            group["step_count"] = step
        self._opt_called = True

    def _units(self) -> list[CompressedUnit]:
        if self._compressed is not None and all(compressed.holds_state() for compressed in self._compressed):
            return self._compressed
        self._compressed = [CompressedUnit(unit, self.segments.of(unit), self.one_bit, self._collectives) for unit in self.units]
        for compressed in self._compressed:
            for name, target in ((WORKER_ERROR, compressed.worker_error), (SERVER_ERROR, compressed.server_error)):
                saved = self._loaded.get(name, {}).get(compressed.unit.name)
                if saved is not None:
                    target[: saved.numel()] = saved
        self._loaded = {}
        still = [name for compressed in self._compressed for name in compressed.still_parameters()]
        if still:
            log_rank0(
                "1-bit Adam: %d parameters had no gradient during the warm-up, so they will not be updated any more (%s); use a "
                "larger freeze_step",
                len(still),
                ", ".join(still[:3]) + (", ..." if len(still) > 3 else ""),
            )
        return self._compressed

    # -- checkpoints ------------------------------------------------------------------------------------------------------

    def rank_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the error vectors of this rank, which differ between ranks but are no shards: kind -> unit -> (n,)."""
        if not self.compresses or self._compressed is None:
            return {name: dict(values) for name, values in self._loaded.items()}
        return {
            WORKER_ERROR: {compressed.unit.name: compressed.worker_error for compressed in self._compressed},
            SERVER_ERROR: {compressed.unit.name: compressed.server_error for compressed in self._compressed},
        }

    def load_rank_states(self, states: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restore the result of ``rank_states`` for this rank and the same number of ranks; without saved vectors, errors start from
        zero.
        """
        self._compressed = None
        self._loaded = dict(states)

    def free_states(self) -> None:
        """Free state and segments, errors included."""
        super().free_states()
        self._compressed, self._loaded = None, {}
