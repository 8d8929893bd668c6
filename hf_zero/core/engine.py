"""Define the engine: a module whose ``backward`` and ``step`` train a sharded model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar
from weakref import WeakMethod, ref

import torch
from torch import nn

from hf_zero.core.engine_parts import AppliedAverages, EngineParts, RunAgain, not_a_loss, step_schedule
from hf_zero.core.offloaded_states import OffloadedStates
from hf_zero.core.optimizer.own_object import allow_steps_over
from hf_zero.core.optimizer.sharded import through_step
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.torch_internals import recompile_limit
from hf_zero.core.step.clipping import find_waiting
from hf_zero.core.step.precision import cast_floating
from hf_zero.core.step.step import Stepper
from hf_zero.core.step.written import drop_gradients
from hf_zero.core.units.sharded_parameter import set_gradient
from hf_zero.errors import ConfigError, StateError
from hf_zero.observe import warn_once

# Layers above attach here: an engine calls these functions without knowing whose they are.
on_build: list[Callable[[Engine], None]] = []  # the engine is complete
on_destroy: list[Callable[[Engine], None]] = []  # it is about to free what it trained with
on_preempted: list[Callable[[Engine], None]] = []  # after a step at which the ranks have agreed that a signal asks them to end
rewound_with_engine: list[Callable[[Engine], Sequence[Any]]] = []  # objects with a state that a rewind takes back with an engine
reasons_to_wait: list[Callable[[], str]] = []  # why a checkpoint must be complete before its save returns; "" where it need not

_running_scales: list[float] = []  # loss scales of the ``Engine.backward`` calls that run now, innermost last


class Engine(nn.Module):
    """Module that trains ``module`` with ZeRO.

    Attributes:
        module: The user's module, the same object.
        optimizer: None for an engine that only runs forward, and after ``destroy``.
        lr_scheduler: Stepped inside ``step``, not by ``optimizer.step``; may be set to None.
        units: The flat buffers.
        samples_per_step: Samples of all ranks in an optimizer step.
        offloaded_states: State that has been moved to the host while the engine is idle.
        preemption: Signals that ask the ranks to end.
        averages: Averages of the engine's weights.
        destroyed: Whether ``destroy`` was called.
    """

    _after_destroy: ClassVar[str] = ": initialize the module again"

    def __init__(self, module: nn.Module, parts: EngineParts) -> None:
        super().__init__()
        self.module = module
        self.runtime = parts.runtime
        self.units = parts.units
        self.collectives = parts.collectives
        self.stage_policy = parts.policy
        self.precision = parts.precision
        self.scaler = parts.scaler
        self.accumulation = parts.accumulation
        self.samples_per_step = parts.samples_per_step
        self.spikes = parts.spikes
        self.progress = parts.progress
        self.clock = parts.clock
        self.checkpoints = parts.checkpoints
        self.reports, self.preemption = parts.reports, parts.preemption
        self.optimizer: Any = parts.optimizer
        self.stepper = parts.stepper
        self.lr_scheduler = parts.scheduler
        self._give_back, self._long_waits = parts.give_back, parts.long_waits
        self._explain = parts.explain
        self.averages, self.destroyed = AppliedAverages(), False
        self._run_again = RunAgain()
        gradients = parts.stepper.reducer.gradients if parts.stepper is not None else ()
        self.offloaded_states = OffloadedStates(parts.runtime, parts.units, parts.collectives.topology.device, parts.optimizer, gradients)
        if parts.optimizer is not None:
            self._scaled_by_user = False
            # Weak: the module's hooks outlive an engine that is dropped.
            self.runtime.backward.on_user_backward = WeakMethod(self._begin_user_backward)
            self.runtime.backward.on_broken_off = WeakMethod(self._broke_off)
            self.runtime.on_zero_grad, self.runtime.on_forward = WeakMethod(self._clear), partial(parts.optimizer.own.parts.take, True)
            self.runtime.on_clip, self.runtime.updated = partial(find_waiting, ref(self)), WeakMethod(parts.optimizer.group_of_tensors)
            parts.optimizer.connect(self.step, self.zero_grad, partial(getattr, self.accumulation, "in_window"))
            if parts.stepper is not None:
                trained = parts.stepper.trained
                trained.on_joined, self.runtime.joining = WeakMethod(self.joined), WeakMethod(trained.joining)

    # -- forward, backward, step ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; its hooks unshard and reshard the parameters.

        Raises:
            StateError: A load failed half way; in training mode: the engine was destroyed, or a backward failed and its gradients are lost.
        """
        if self.averages.half_loaded:
            self.averages.require_weights("a forward")
        trains, given = self.training and torch.is_grad_enabled(), (args, kwargs)
        if trains:
            if self.destroyed:
                raise StateError(f"a forward for training on an engine that was destroyed{self._after_destroy}")
            self.runtime.forget_broken()
            self.accumulation.require_window()
            self.runtime.forward.failed -= self._run_again.is_of(given)
        self.runtime.follow_compile()
        if self.precision.casts_inputs and self.precision.param_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), self.precision.param_dtype)
        with self.clock.phase("forward"), self.autocast():
            try:
                return self.module(*args, **kwargs)
            except Exception as error:
                self._explain(self, error, "forward")
                self.runtime.forward.raised(trains)
                if trains:
                    self._run_again.raised(given)
                raise

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward: ``torch.autocast`` if ``torch_autocast`` is configured, or a null context."""
        device_type = self.collectives.topology.device.type
        if self.precision.autocast_dtype is not None:
            return torch.autocast(device_type, dtype=self.precision.autocast_dtype)
        if torch.is_autocast_enabled(device_type):
            warn_once(
                "torch.autocast is on around the engine but torch_autocast.enabled is not set: it is switched off inside forward. "
                'Write "torch_autocast": {"enabled": true, "dtype": "bfloat16"} to have it'
            )
            return torch.autocast(device_type, enabled=False)
        return nullcontext()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any) -> torch.Tensor:
        """Back-propagate ``loss`` and reduce the gradients at the time that the ZeRO stage prescribes; collective.

        Args:
            loss: Scalar of this rank's micro-batch.
            retain_graph: As in ``Tensor.backward``.
            scale_wrt_gas: Divide by ``gradient_accumulation_steps``; False when the caller has normalised the loss.
            **kwargs: Passed to ``Tensor.backward`` (``inputs``, ``create_graph``).

        Returns:
            ``loss``, divided as it was back-propagated (without the loss scale).

        Raises:
            StateError: The engine has no optimizer, or another engine has taken its module.
            TypeError: ``loss`` is not a tensor.
        """
        self._require_optimizer("backward")
        if not isinstance(loss, torch.Tensor):
            raise TypeError(not_a_loss(loss))
        if scale_wrt_gas and self.accumulation.steps > 1:
            loss = loss / self.accumulation.steps
        self.spikes.loss.add(loss)
        scale = self.scaler.scale
        scaled = loss if scale == 1.0 else loss.float() * scale
        with self.clock.phase("backward"):
            self._begin_micro_step()
            self.runtime.backward.begin()
            self.runtime.backward.expect(scaled)
            _running_scales.append(scale)
            try:
                with self.runtime.saved.backward():
                    scaled.backward(retain_graph=retain_graph, **kwargs)  # type: ignore[no-untyped-call]
            except BaseException as error:
                self._explain(self, error, "backward")
                self.runtime.backward.break_off(error)
                raise
            finally:
                _running_scales.pop()
            self.runtime.backward.end()
        return loss

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Multiply ``loss`` by the loss scale, for callers who write ``engine.scale(loss).backward()`` themselves.

        ``retain_graph`` changes nothing: a second backward over the graph unshards again.

        Raises:
            StateError: The engine has no optimizer, another engine has taken its module, or ``loss`` is not a scalar.
        """
        self._require_optimizer("scale")
        if loss.numel() != 1:
            raise StateError(f"scale() takes the loss, a scalar tensor, not one of shape {tuple(loss.shape)}: sum it up, or take the mean")
        self.spikes.loss.add(loss, self.accumulation.steps)
        self._scaled_by_user = True
        return loss if self.scaler.scale == 1.0 else loss.float() * self.scaler.scale

    def _begin_micro_step(self, factor: float = 1.0) -> None:
        """Begin a micro-step: its backward adds gradients, multiplied by ``factor``."""
        boundary = self.accumulation.begin(self.runtime.forwards)
        self.stepper.begin_micro_step(boundary, self.accumulation.in_no_sync, factor)  # type: ignore[union-attr]

    def _begin_user_backward(self) -> None:
        """[Note: a backward the user starts]

        ``loss.backward()`` on a loss made of the engine's outputs is a micro-step like ``engine.backward(loss)``: its gradients are divided
        by ``gradient_accumulation_steps``, on their way into the flat buffers, unless it is a plain one (``Accumulation.plain``). If there
        is a loss scale, the caller must have multiplied the loss by it (``scale``). Another engine's ``backward`` that reaches this module
        (the two halves of a GAN) has divided already, and has scaled with its own loss scale, which is exchanged for ours.
        """
        self._require_optimizer("a backward of its module")
        scale, scaled, self._scaled_by_user = self.scaler.scale, self._scaled_by_user, False
        if not scaled:
            self.spikes.loss.add(None)
        if _running_scales:
            self._begin_micro_step(scale / _running_scales[-1])
            return
        if scale != 1.0 and not scaled:
            raise StateError(
                f"Loss scaling is required: loss.backward() ran without the loss scale of {scale:g}, so small fp16 gradients "
                "would be lost. Call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._begin_micro_step(self.accumulation.factor_of_script())

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take an optimizer step at a boundary: clip, update, all-gather updated parameters, step the scheduler. Do nothing before the
        boundary. Collective.

        Gradients that the script has assigned to ``param.grad``, after a backward or in place of one, take the place of the engine's own at
        stages 0 to 2: the engine uses their mean over ranks, divided by the loss scale like all gradients.

        Args:
            lr_kwargs: Keyword arguments for the scheduler's ``step``; without them, a scheduler that requires a number gets the number of
                samples.

        Raises:
            StateError: The engine has no optimizer, another engine has taken its module, or the last backward broke off.
        """
        stepper = self._require_optimizer("step")
        self.progress.last_step_applied = False
        self.runtime.forget_broken()
        self.runtime.require_forward("step()")
        if not self.accumulation.awaits_step:
            self._begin_written(stepper)
        stepper.reducer.shown.replaced = False
        if not self.accumulation.step_called():
            return
        progress, samples = self.progress, self.accumulation.samples_of_step(self.samples_per_step)
        with self.clock.phase("step"):
            try:
                watch = self.spikes.watch(progress.global_steps, progress.global_samples, samples)
                result = through_step(stepper.optimizer, lambda: stepper.take(watch), self.optimizer, stepper.agree)
            except Exception as error:
                self._explain(self, error, "step")
                self.accumulation.refused()
                raise
        self.accumulation.stepped()
        stepper.equal.forget()
        samples *= result.groups
        if result.groups:  # if not, another replica group has taken the step, and this one has received the state after it
            progress.count_step(samples, result.norm, result.skipped)
            progress.last_loss = self.spikes.loss.last
            if self.spikes.requires_rewind(progress.global_steps):
                self.checkpoints.rewind(self)
            if self.lr_scheduler is not None and not result.skipped:
                step_schedule(self.lr_scheduler, lr_kwargs, samples, progress.global_steps if stepper.optimizer.called else 0)
        offloaded = self.optimizer.offloaded() if self.clock.memory else {}
        self.clock.end_step(progress.global_steps, samples, offloaded)
        self.reports.report(progress, self.optimizer.param_groups, self.scaler.scale)
        if result.signal:
            self.preemption.agree(result.signal)
            for hook in on_preempted:
                hook(self)

    def _begin_written(self, stepper: Stepper) -> None:
        """Begin a micro-step without a backward if the script has written gradients. Collective.

        Without such gradients this is an ordinary call of ``step``, which may be the one that updates.
        """
        agreed = stepper.agree()
        written = agreed.written or stepper.reducer.shown.replaced or (agreed.waits and not self.accumulation.in_window)
        boundary = self.accumulation.begin(None) if written else self.accumulation.repeats()
        if not (written or boundary):
            return
        stepper.prepare(boundary)
        if boundary:
            stepper.reducer.complete(self.stage_policy.allows_deferral)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that wait for ``step``, and ``param.grad`` of parameters that no unit trains; every rank must call it.

        In the middle of an accumulation the gradients so far are kept: scripts call this after every micro-step. Gradients that a
        ``no_sync`` without steps has left are discarded. ``zero_grad`` of the module and of the optimizers is the same.
        """
        kept = self._clear(params := list(self.module.parameters()))
        for param in params:
            if id(param) not in kept:
                set_gradient(param, None)  # torch's own: a gradient that waits in another engine, which shares the parameter, stays

    def _clear(self, params: Sequence[nn.Parameter]) -> frozenset[int]:
        """Discard the gradients of ``params`` that wait for ``step``, or zero those of a part of the model; every rank must call it.

        Returns:
            The ids of the parameters whose ``grad`` must stay: one that joins at the coming step has its gradients so far there.
        """
        self.runtime.begin_clearing()
        if self.stepper is None:
            return frozenset()
        given, count = set(map(id, params)), self.accumulation
        set_alone = self.stepper.reducer.shown.replaced and not count.in_window
        waits = count.awaits_update or count.held_back or count.broken or set_alone
        everything = all(id(param) in given for param in self.module.parameters())
        if waits and everything:
            self.discard_gradients()
        elif waits:
            drop_gradients(self.stepper.reducer, given)
        elif everything:
            count.cleared()
        return self.stepper.trained.waiting() if count.in_window and not waits else frozenset()

    def joined(self, entries: Sequence[UnitGradients]) -> None:
        """Add units that were made from parameters that are trained from this step on; collective.

        Args:
            entries: The gradients of these units.
        """
        self.averages.follow()

    def discard_gradients(self) -> None:
        """Discard gradients accumulated since the last step, on this rank; every rank must call it."""
        if self.stepper is not None:
            self.runtime.backward.discard()
            self.stepper.trained.forget_waiting()
            self.accumulation.discarded()
            self.stepper.equal.forget()

    def _broke_off(self) -> None:
        """Record that a backward failed with an error: the gradients since the last optimizer step are lost; local."""
        self.accumulation.backward_failed()
        if self.stepper is not None:
            self.stepper.equal.forget()
            self.stepper.trained.forget_waiting()

    # -- accumulation -------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, steps: bool = True) -> Iterator[None]:
        """Treat micro-steps inside the ``with`` as not being the last of an optimizer step.

        At stages 0 and 1 their gradients stay unsharded and local, and are reduced with the first backward outside. At stages 2 and 3
        they are reduced at once, because only their shards are kept.

        Args:
            steps: ``step`` inside does nothing; False makes it an error.
        """
        self.accumulation.enter_no_sync(steps)
        try:
            yield
        finally:
            self.accumulation.leave_no_sync()

    # -- saving and loading -------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write ``<save_dir>/<tag>/`` with everything that a run needs to resume, with any number of ranks; collective.

        Args:
            save_dir: Folder of all checkpoints of the run, or its URL in an object store (``s3://bucket/run``).
            tag: Name of this checkpoint; ``global_step{N}`` when None. Rank 0's value is used, as for the other arguments.
            client_state: Values of the caller, returned by ``load_checkpoint``; no pickle, so plain values and tensors only.
            save_latest: Write the tag into ``<save_dir>/latest``.
            exclude_frozen_parameters: Leave frozen parameters out (a PEFT base model).

        Raises:
            CheckpointError: On every rank, when it cannot be written; earlier checkpoints stay as they are.
        """
        self.runtime.require_forward("save_checkpoint()")
        with self.clock.aside():
            self.checkpoints.save(self, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Restore a checkpoint of ``save_checkpoint``, with any number of ranks and any stage; collective.

        Args:
            load_dir: Folder of all checkpoints of the run, or its URL in an object store.
            tag: Name of the checkpoint; None is the one that ``<load_dir>/latest`` names.
            load_module_strict: The checkpoint must hold exactly this model's parameters and buffers.
            load_optimizer_states: Restore moments, param groups and loss scale; if False, masters come from the weights.
            load_lr_scheduler_states: Restore the engine's scheduler.
            load_module_only: Restore parameters and buffers alone.
            custom_load_fn: Called with ``src=`` complete state dict and ``dst=`` module, unsharded, to load the parameters.

        Returns:
            The folder and the client state; (None, None) when no tag is given and there is no ``latest``.

        Raises:
            CheckpointError: On every rank, naming the file or parameter that does not fit.
        """
        self.runtime.require_forward("load_checkpoint()")
        self.checkpoints.wait()
        self.runtime.reshard_for_update()
        restored = self.checkpoints.load(
            self,
            load_dir,
            tag,
            custom_load_fn,
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
        )
        if restored is None:
            return None, None
        self.progress.loads += 1
        self.discard_gradients()
        if restored.counters is not None:
            self.progress.restore(restored.counters)
            self.accumulation.micro_steps = restored.counters.get("micro_steps", 0)
        return restored.path, restored.client_state

    # -- life ---------------------------------------------------------------------------------------------------------

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Compile every block in place with torch.compile (the complete module when no block was found).

        Args:
            backend: As for ``torch.compile``.
            compile_kwargs: Further arguments of ``torch.compile``.
            **kwargs: The same, as ``nn.Module.compile`` takes them; they stand above ``compile_kwargs``.
        """
        targets = [block.module for block in self.runtime.blocks] or [self.module]
        options = {"backend": backend, **recompile_limit(len(targets)), **(compile_kwargs or {}), **kwargs}
        for target in targets:
            target.compile(**options)
        self.runtime.follow_compile(inside=True)

    def to(self, *args: Any, **kwargs: Any) -> Engine:
        """Return the engine if the arguments change nothing; units can be neither moved nor cast.

        Raises:
            ConfigError: The arguments name another device or floating-point dtype.
        """
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        here = self.collectives.topology.device
        if device is not None and device.type != here.type:
            raise ConfigError(f"engine.to({device}): the engine lives on {here}; initialize() chooses the device of the local rank")
        present = self.precision.param_dtype or torch.float32
        if dtype is not None and dtype != present:
            raise ConfigError(f"engine.to({dtype}): the engine trains in {present}; set fp16, bf16 or data_types in the configuration")
        return self

    def destroy(self) -> None:
        """Free gradients, masters and optimizer state. The module stays usable: unsharded at stages 0 to 2, unsharded by its hooks at
        stage 3.
        """
        self.destroyed = True
        self.preemption.stop()
        for hook in on_destroy:
            hook(self)
        self.checkpoints.close()
        self.reports.close()
        if self.stepper is not None:
            self.runtime.stop_training()
            self.optimizer.free_states()  # first: it waits for running updates, failed ones too
            for unit in self.units:
                unit.own.drop_master()
            if self._give_back is not None:
                self._give_back()
        allow_steps_over(self.collectives.data)
        self.stepper = self.optimizer = self.lr_scheduler = None
        self.offloaded_states.close()
        self._long_waits.stop()

    def _require_optimizer(self, what: str) -> Stepper:
        if self.stepper is None:
            raise StateError(
                f"{what}() on an engine without optimizer; pass optimizer= to initialize(), or an optimizer section with model_parameters="
            )
        self.offloaded_states.require_none(f"{what}()")
        self.averages.require_weights(f"{what}()")
        if not self.runtime.attached:
            raise StateError(f"{what}() on an engine whose module was given to another initialize(); use the newer engine")
        if lost := self.runtime.lost:
            raise StateError(
                f"{what}(): this engine's parameters {lost} were given to another initialize(), which trains them: a parameter has one "
                "engine. Put the models that share them into one module with one engine, whose forward runs both, and add up the "
                "losses; or leave them out of the optimizer of one of the two engines"
            )
        return self.stepper
