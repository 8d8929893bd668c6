"""Let the engine of one replica group step together with those of the other groups; see [Note: replica groups]."""

from __future__ import annotations

import atexit
import gc
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hf_zero.checkpoint.engine_checkpoints import EngineCheckpoints
from hf_zero.checkpoint.state.training_state import values_of
from hf_zero.comm.process_groups import exists
from hf_zero.core.engine import Engine, on_destroy
from hf_zero.core.step.agreement import facts_of
from hf_zero.core.step.written import WrittenValues
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.native.ranges import crc32_chunks
from hf_zero.observe import log_rank0
from hf_zero.replica_groups.quorum import Formed, Quorum, group_number
from hf_zero.replica_groups.sampler import Shares, serve_numbers
from hf_zero.replica_groups.transfer import receive_state, send_state
from hf_zero.system import exit_status, last_words

_DIGEST_BYTES = 7  # of a digest, which is sent as a 64-bit integer
_FACT_BYTES = 3
_joined: list[Any] = []  # of ReplicaGroups, at most one


class ReplicaGroups:
    """The other replica groups, for one engine. The constructor is collective inside the group.

    Args:
        engine: The engine, which has an optimizer.

    Attributes:
        group: Number of this group.
        members: Numbers of the groups that take part in the present step, or took part in the last one.
        taken: For each of these, the numbers of the batches of the last step; empty after a step that was received from another group.
        shares: The batches of all groups.

    Raises:
        ConfigError: Variables of the environment are missing, torchft is not installed, or another engine of this process trains together
            with other groups.
    """

    def __init__(self, engine: Engine) -> None:
        _joined[:] = [known for known in _joined if not known.engine.destroyed]
        if _joined:
            raise ConfigError(
                "hf_zero.replicas is set for two training engines of this script, and only one can train together with other replica "
                "groups: remove the key from one configuration, or call destroy() of the first engine"
            )
        topology = engine.collectives.topology
        divided = (topology.replicate, topology.model, topology.expert, topology.pipe)
        if any(axis is not None for axis in divided) or getattr(engine, "sequence_parallel", None) is not None:
            raise UnsupportedError(
                "hf_zero.replicas with ranks that are divided in other ways too (dp_replicate, tensor, sequence or expert parallelism, "
                "pipelines) is not provided: the ranks of a replica group can only shard the model states"
            )
        self.engine = engine
        self.group = group_number()
        self.members: tuple[int, ...] = ()
        self.taken: dict[int, list[int]] = {}
        self.shares = Shares()
        self._net = engine.collectives.data
        self._quorum = Quorum(self.group, self._net)
        self._begun = False  # whether the quorum of the coming step is formed
        self._digest = -1  # history of this group, of 7 bytes
        self._fresh = True  # whether these processes have neither taken a step nor received a state
        self._loads = -1  # loads of the engine of which the digest knows
        self._ahead = 0  # batches that each group is given in advance; 0 if no sampler asks
        self._read: list[int] = []  # numbers that the sampler was given, from position ``_first`` on
        self._first = 0  # batches that the steps of this process have taken
        self._settled = self.shares.state_dict()  # shares after the last step
        self._late: Any = None  # states of the script's schedulers, which the script steps once more before the coming step
        _joined.append(self)
        serve_numbers(self)

    # -- the begin of a step -----------------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, _args: Any) -> None:
        """Meet the other groups before the first forward of an optimizer step; a forward-pre-hook of the engine. Collective."""
        if module.training and torch.is_grad_enabled() and not self.engine.accumulation.in_window:
            self.begin()

    def begin(self) -> None:
        """Meet the other groups, and receive the newest state if this group does not have it; collective over the groups.

        Raises:
            StateError: See ``Quorum.form`` and ``_follow``.
        """
        if self._late is not None:
            self._restore_schedulers(self._late)
            self._late = None
        if not self._begun:
            self._meet(inside_step=False)

    def number(self, position: int, ahead: int) -> int:
        """Return the number of the batch at ``position`` among those that this process reads; collective at the first call.

        Raises:
            StateError: The loader reads further ahead than ``ahead`` batches.
        """
        if not self._ahead:
            self._ahead = ahead + 2 * self.engine.accumulation.steps
        if not self.members:
            self.begin()
        own, index = self.shares.held.get(self.group, []), position - self._first
        if index != len(self._read):
            raise StateError("two loaders read by a ReplicaSampler, and only one can: give other loaders another sampler")
        if index >= len(own):
            raise StateError(
                f"the loader reads batch {index + 1} after the {self._first} that were taken, and a group is given {self._ahead} in "
                f"advance: raise ReplicaSampler(ahead={ahead}) in all groups, to the workers times prefetch_factor and 2 more"
            )
        self._read.append(own[index])
        return own[index]

    def _meet(self, inside_step: bool) -> bool:
        """Form a quorum that has exchanged its states; return whether this group has received one of a later step. Collective."""
        engine, received = self.engine, False
        while True:
            if self._loads != engine.progress.loads:
                self._loads, self._digest = engine.progress.loads, self._fingerprint()
            formed = self._quorum.form(engine.progress.global_steps, self._digest, self._fresh)
            if formed.targets or formed.source is not None:
                WrittenValues(engine.units, self._net, self._net, engine.runtime.idle).agree(self._net)
                engine.runtime.reshard_for_update()
            if formed.targets:
                send_state(self._state(), self._own_facts(), self._quorum, formed.targets)
            elif formed.source is not None:
                sent = receive_state(self._state(), self._quorum, formed.source)
                if sent is not None:
                    self._follow(sent, inside_step)
                    received = True
            if not self._quorum.any_failed():
                break
            self._quorum.give_up()
        self._begun = True
        self._note(formed)
        return received

    def _note(self, formed: Formed) -> None:
        members = tuple(member.group for member in formed.members)
        if members != self.members:
            log_rank0("step %d: replica groups %s train (this is group %d)", formed.step + 1, _text(members), self.group)
        self.members = members
        if self._ahead:
            # From the shares after the last step: a quorum that failed may have been formed for some groups only.
            self.shares.load_state_dict(self._settled)
            self.shares.give(members, self._ahead)
            self._require_same_reads()

    def _require_same_reads(self) -> None:
        """Raise if batches that this process has read belong to other groups now.

        Raises:
            StateError: See above.
        """
        if self.shares.held.get(self.group, [])[: len(self._read)] != self._read:
            raise StateError(
                f"replica group {self.group} was left out of a step, and the batches that its loader has read were given to other groups. "
                "Let the error end the ranks, so that the launcher starts them again"
            )

    # -- states ------------------------------------------------------------------------------------------------------------

    def _state(self) -> Any:
        checkpoints = self.engine.checkpoints
        if not isinstance(checkpoints, EngineCheckpoints):
            raise StateError(
                f"replica groups send each other checkpoints, and this engine makes them with {type(checkpoints).__name__}; only engines "
                "that hf_zero.initialize has made can train together with other groups"
            )
        return checkpoints.state_of(self.engine)

    def _own_facts(self) -> dict[str, Any]:
        norm = self.engine.progress.last_norm
        return {
            "shares": self._settled,
            "digest": self._digest,
            "norm": None if norm is None else float(norm),
            "schedulers": [scheduler.state_dict() for scheduler in _schedulers_of(self.engine)],
        }

    def _follow(self, sent: Mapping[str, Any], inside_step: bool) -> None:
        """Continue from the state of another group, which the engine has loaded.

        Args:
            sent: Result of ``receive_state``.
            inside_step: The batches of the present step were taken by that group's step, or by another group.

        Raises:
            StateError: Batches that this process has read were given to other groups meanwhile.
        """
        engine = self.engine
        held, self.taken = self.shares.held.get(self.group, []), {}
        self.shares.load_state_dict(sent["shares"])
        now = self.shares.held.get(self.group)
        if self._read and now is not None and held[len(held) - len(now) :] == now:
            took = len(held) - len(now)
            del self._read[:took]
            self._first += took
        self._require_same_reads()
        self._settled = self.shares.state_dict()
        engine.discard_gradients()
        counters = sent["counters"] or {}
        engine.progress.restore(counters)
        engine.accumulation.micro_steps = counters.get("micro_steps", 0)
        engine.progress.last_norm = None if sent["norm"] is None else torch.tensor(sent["norm"], device=engine.collectives.topology.device)
        if inside_step:
            self._late = sent["schedulers"]
        else:
            self._restore_schedulers(sent["schedulers"])
        engine.optimizer.norm = engine.progress.last_norm
        engine.progress.last_step_applied = inside_step
        engine.progress.loads += 1
        self._loads, self._digest, self._fresh = engine.progress.loads, sent["digest"], False
        log_rank0("replica group %d continues after step %d with the state of another group", self.group, engine.progress.global_steps)

    def _restore_schedulers(self, states: Sequence[Any]) -> None:
        """Set the schedulers that the script steps, and the learning rates, to those of another group."""
        own = _schedulers_of(self.engine)
        if len(own) != len(states):
            raise StateError(f"this replica group has {len(own)} schedulers of the learning rate, and another group {len(states)}")
        for scheduler, state in zip(own, states, strict=True):
            scheduler.load_state_dict(state)
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(float(rate))
                else:
                    group["lr"] = float(rate)

    def _fingerprint(self) -> int:
        """Return a digest of the weights and of the number of steps; collective inside the group."""
        sums = []
        for unit in self.engine.units:
            data: Any = values_of(unit).detach().to("cpu").contiguous().view(torch.uint8).numpy()
            sums += [int(value) for value in crc32_chunks(memoryview(data), max(1, len(data)))]
        everyone = self._net.gather_objects(sums, "digest of the weights")
        return _digest_of(everyone, self.engine.progress.global_steps)

    def batches(self) -> dict[str, Any]:
        """Return the batches after the last step, as plain JSON values; a checkpoint holds them."""
        return self._settled

    def continue_with(self, batches: Mapping[str, Any]) -> None:
        """Continue with the batches of a loaded checkpoint, unless this process has read batches already; local."""
        if not (self._first or self._read):
            self.shares.load_state_dict(batches)
            self._settled = self.shares.state_dict()

    # -- the end of a step -------------------------------------------------------------------------------------------------

    def average(self, shards: Sequence[torch.Tensor], max_norm: float) -> int:
        """Replace the gradients by their mean over the groups, and agree that the step is taken; collective over the groups.

        If a group dies, the others average again without it.

        Args:
            shards: This rank's reduced gradients, one 1D tensor per unit.
            max_norm: Norm that gradients are clipped to.

        Returns:
            The number of groups that take the step; 0 if another group has taken it and this group has received the state after it.

        Raises:
            StateError: The groups differ in what must be the same: micro-steps, trained parameters, hyper-parameters.
        """
        self.begin()
        count = self.engine.accumulation.of_step
        while True:
            members = self.members
            means = [shard.detach().to("cpu", copy=True) for shard in shards]
            facts = self._facts(count, means, max_norm)
            both = self._quorum.largest([*facts, *(-fact for fact in facts)])
            if not self._quorum.any_failed():
                if both[: len(facts)] != [-least for least in both[len(facts) :]]:
                    raise self._refusal(facts, both)
                self._quorum.average(means)
            self._begun = False
            if self._quorum.vote():
                break
            if self._meet(inside_step=True):
                return 0
        for shard, mean in zip(shards, means, strict=True):
            shard.copy_(mean)
        self._fresh = False
        progress = self.engine.progress
        self._digest = _digest_of(members, progress.global_steps, progress.skipped_steps, self._digest)
        if self._ahead:
            self.taken = self.shares.take(members, count)
            del self._read[:count]
            self._first += count
            self._settled = self.shares.state_dict()
        return len(members)

    def _facts(self, count: int, shards: Sequence[torch.Tensor], max_norm: float) -> list[int]:
        """Return numbers that must be the same on all groups: micro-steps, elements, batches in advance, hyper-parameters."""
        engine = self.engine
        lines = [*facts_of(engine.optimizer.inner), f"{max_norm} {engine.scaler.scale}", *(str(shard.dtype) for shard in shards)]
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=_FACT_BYTES).digest()
        shared = _digest_of(self.shares.state_dict())
        return [count, len(shards), sum(shard.numel() for shard in shards), self._ahead, int.from_bytes(digest, "big"), shared]

    def _refusal(self, facts: Sequence[int], both: Sequence[int]) -> StateError:
        names = (
            "micro-steps",
            "trained units",
            "trained elements",
            "batches in advance",
            "a digest of hyper-parameters",
            "a digest of the numbers of batches",
        )
        different = [
            f"{name} from {-least} to {most}, {fact} in group {self.group}"
            for name, fact, most, least in zip(names, facts, both, both[len(facts) :], strict=False)
            if most != -least
        ]
        return StateError(f"the replica groups are not alike at step {self.engine.progress.global_steps + 1}: {'; '.join(different)}")

    # -- the end of a training ---------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the other groups when no group needs this one's state any more; collective over the groups.

        A group may have failed to take the last step, and gets the state after it.
        """
        if self not in _joined:
            return
        if not self._fresh:
            self.begin()
        self.close()

    def close(self) -> None:
        """Leave the other groups at once; local."""
        if self in _joined:
            _joined.remove(self)
            self._quorum.close()


def _leave_at_end() -> None:
    """Leave the other groups at the end of the process, unless an exception ends it."""
    for groups in list(_joined):
        if exit_status.ends_with_an_exception() or last_words.ends_with_a_status() or not exists(groups.engine.collectives.topology.group):
            groups.close()
        else:
            groups.leave()


def _leave_with(engine: Engine) -> None:
    """Leave the other groups when the engine is destroyed."""
    for groups in list(_joined):
        if groups.engine is engine:
            groups.leave()


on_destroy.append(_leave_with)
atexit.register(_leave_at_end)


def _schedulers_of(engine: Engine) -> list[LRScheduler]:
    """Return torch's schedulers of the engine's optimizer that the engine does not step: those of the script, Accelerate or Trainer.

    Nobody registers them, so they are found among the objects of the process, which takes a moment; it is done only when a group returns.
    """
    optimizers = (engine.optimizer, engine.optimizer.inner)
    found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler) and one is not engine.lr_scheduler]
    own = [one for one in found if any(getattr(one, "optimizer", None) is optimizer for optimizer in optimizers)]
    inner = {id(part) for one in (*own, engine.lr_scheduler) for part in getattr(one, "_schedulers", ())}
    return sorted((one for one in own if id(one) not in inner), key=lambda one: type(one).__name__)


def _digest_of(*facts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=_DIGEST_BYTES).digest(), "big")


def _text(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def join(engine: Engine) -> None:
    """Let a new engine train together with other replica groups, if the configuration wants it; collective inside the group."""
    if engine.stepper is None or engine.collectives.pretended:
        return
    groups = ReplicaGroups(engine)
    if isinstance(engine.checkpoints, EngineCheckpoints):
        engine.checkpoints.batches = groups
    engine.stepper.groups = groups
    engine.stepper.trained.skips_unused = False  # another group may have the gradient
    engine.register_forward_pre_hook(groups.before_forward)
