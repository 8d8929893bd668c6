"""Decide which backward is the last of its optimizer step, by counting calls or by the caller's declaration."""

from __future__ import annotations

from collections.abc import Callable

from hf_zero.errors import StateError
from hf_zero.observe import warn_once


class Accumulation:
    """Counter of micro-steps, which decides which calls of ``step`` update, for every calling convention in use.

    [Note: accumulation protocols] Some callers declare before each backward whether it is the boundary, and call ``step`` only there;
    others call ``step`` after every micro-step and rely on the count, or step the optimizer itself. Calls of ``step`` are counted: with
    ``steps`` 2, every second call updates, with all gradients since the last update, however many backwards (losses of several forwards)
    come before each call. So it is known before each backward whether the next call of ``step`` updates.

    [Note: a backward that broke off] The gradients of a backward that failed are in the same sums as those of the backwards before it, so
    all of them are discarded. The rest of the optimizer step would average over too few micro-steps, and a ``step`` would update with
    zeros: both are errors until the caller calls ``zero_grad``. If there were no backwards before the failed one, the caller only has to
    run it again.

    Attributes:
        steps: Number of micro-steps per optimizer step.
        managed: Whether the engine counts; otherwise every call of ``step`` is a boundary.
        boundary: Whether the micro-step begun last is a boundary.
        micro_steps: Number of micro-steps so far.
        plain: Whether a backward that the script starts is one of plain PyTorch: nothing divides it, and the next step updates.
        several: Whether several backwards before one ``step`` are expected, because the loop says by other means where it updates.
        held_back: Whether the last backward was inside a ``no_sync`` that allows no step and is closed now; its gradients were not reduced.
    """

    def __init__(self, steps: int, managed: bool) -> None:
        self.steps = steps
        self.managed = managed
        self.plain = False
        self.several = False
        self.boundary = False
        self.micro_steps = 0
        self._said: bool | None = None
        self._in_cycle = 0  # micro-steps since the last optimizer step
        self._steps_called = 0  # calls of ``step`` since the last optimizer step
        self._seen_forwards = -1
        self._no_sync_depth = 0
        self._refuses_step = False
        self.held_back = False
        self._awaits_step = False  # between a backward and the step call that follows it
        self._backwards = 0  # backwards since the last optimizer step
        self._lost = 0  # number of backwards whose gradients were lost to a later backward that failed
        self._broke = False  # whether the last backward failed
        self._cleared = False  # whether ``zero_grad`` was called after the last backward

    def say(self, is_boundary: bool) -> None:
        """Let the caller decide from now on whether a micro-step is a boundary; ``is_boundary`` is for the next one.

        Raises:
            StateError: ``managed_gradient_accumulation`` is false.
        """
        if not self.managed:
            raise StateError(
                "set_gradient_accumulation_boundary was called but managed_gradient_accumulation is false in the configuration: "
                "every step() applies an update then. Remove the call or the key"
            )
        self._said = bool(is_boundary)

    def factor_of_script(self) -> float:
        """Return the factor of the gradients of a backward that the script starts, which a plain one makes the last of its step."""
        if not self.plain:
            return 1.0 / self.steps
        if self.managed:
            self.say(True)  # inside a no_sync it has no effect
        return 1.0

    def begin(self, forwards: int | None) -> bool:
        """Begin a backward after ``forwards`` forwards so far; return whether its gradients complete an optimizer step.

        ``forwards`` is None if gradients that the caller has written replace a backward.

        Raises:
            StateError: A backward failed, and gradients before it are lost.
        """
        self.require_window()
        self._backwards += 1
        self._broke = self._cleared = False
        if forwards is None or forwards != self._seen_forwards:
            if self._awaits_step and self.managed and self._said is None and self.steps > 1 and not self.several:
                self._warn_of_several_calls()
            self._seen_forwards = self._seen_forwards if forwards is None else forwards
            self.micro_steps += 1
            self._in_cycle += 1
        self.boundary = self.next_is_boundary()
        self._awaits_step = True
        self.held_back = False
        return self.boundary

    def begin_all(self) -> None:
        """Begin all micro-steps of an optimizer step as one backward."""
        self._backwards += 1
        self.micro_steps += self.steps
        self._in_cycle = self.steps
        self.boundary = self._awaits_step = True

    def current_is_boundary(self) -> bool:
        """Return whether the micro-step that the caller is in (or about to begin) is a boundary."""
        return self.boundary if self._awaits_step else self.next_is_boundary()

    @property
    def awaits_update(self) -> bool:
        """Return whether the gradients of an optimizer step are complete and ``step`` has not been called yet."""
        return self.boundary and self._awaits_step

    @property
    def in_window(self) -> bool:
        """Return whether there were micro-steps since the last optimizer step."""
        return self._in_cycle > 0

    def samples_of_step(self, total: int) -> int:
        """Return the number of samples, over all ranks, in the present optimizer step.

        Args:
            total: The number in an optimizer step of ``steps`` micro-steps. If the engine does not count micro-steps (``managed`` is
                false), a step may have more or fewer of them, and the result is in proportion.
        """
        return total if self.managed else total // self.steps * self._in_cycle

    @property
    def of_step(self) -> int:
        """Return the number of micro-steps since the last optimizer step."""
        return self._in_cycle

    @property
    def awaits_step(self) -> bool:
        """Return whether there was a backward after the last ``step``."""
        return self._awaits_step

    def step_called(self) -> bool:
        """Count a call of ``step``; return whether it updates.

        Raises:
            StateError: The open ``no_sync`` allows no step; or this step would update and the last backward was inside a ``no_sync``; or
                the last backward failed.
        """
        self.require_window()
        if self._broke:
            raise StateError("step() after a backward that broke off with an error: there are no gradients. Run forward and backward again")
        if self._refuses_step:
            raise StateError(
                "It is illegal to call Engine.step() inside no_sync context manager: backwards in the block do not complete an optimizer "
                "step. Run the last backward of the step outside of the block, and call step() after it"
            )
        if self.held_back and self.next_is_boundary():
            raise StateError(
                "step() is due to update, but the last backward ran inside no_sync(), which means that more backwards of this "
                "optimizer step follow. Run the last backward outside of the block, or drop its gradients with zero_grad()"
            )
        self._awaits_step = False
        self._steps_called += not self.boundary
        if self._steps_called >= self.steps and not self._backwards:
            self._steps_called = 0  # the step that would update had no gradients
        return self.boundary

    def next_is_boundary(self) -> bool:
        """Return whether the next call of ``step`` updates, so that the backwards before it complete an optimizer step."""
        if self._no_sync_depth:
            return False
        if not self.managed:
            return True
        if self._said is not None:
            return self._said
        return self._steps_called + 1 >= self.steps

    def _warn_of_several_calls(self) -> None:
        warn_once(
            f"gradient_accumulation_steps is {self.steps}, and several backwards of new forwards came before one step(). The "
            f"engine counts calls of step(): every {self.steps}. call updates, with all gradients since the last update, each "
            f"loss divided by {self.steps}. To update after each step(), call step() after every backward, or call "
            "set_gradient_accumulation_boundary(is_boundary) before it"
        )

    def repeats(self) -> bool:
        """Return whether this ``step``, without a backward since the last one, completes an optimizer step by the count of calls; then
        mark a boundary.
        """
        counts = self.managed and self._said is None and not self.broken and not self.held_back
        if not (counts and self._backwards and not self._awaits_step and self.next_is_boundary()):
            return False
        self.boundary = self._awaits_step = True
        return True

    def completed(self) -> bool:
        """Declare, for the caller, that the backwards so far complete an optimizer step; return whether there were any."""
        self.boundary = self._awaits_step
        return self.boundary

    def stepped(self) -> None:
        """Begin a new cycle after an optimizer step."""
        self._in_cycle = self._steps_called = self._backwards = self._lost = 0
        self.boundary = self._awaits_step = self.held_back = self._broke = self._cleared = False

    def refused(self) -> None:
        """Note that a ``step`` that would have updated has raised: it can be called again, or ``zero_grad`` discards the gradients."""
        self._awaits_step = self.boundary

    def count_from(self, micro_steps: int, discard: Callable[[], None]) -> None:
        """Set the number of micro-steps so far, as scripts do that begin a new accumulation at each epoch; ``step`` counts from there.

        [Note: an accumulation that begins again] A script that calls ``zero_grad()`` in the middle of an accumulation and sets the count
        to a multiple of ``steps`` drops the gradients so far. ``zero_grad()`` alone keeps them, because scripts call it after every
        micro-step; so it is noted, and ``discard`` is called here.

        Args:
            micro_steps: The number.
            discard: Drops the gradients since the last optimizer step.

        Raises:
            StateError: An accumulation would begin again with gradients that ``zero_grad()`` has not dropped.
        """
        counts = self.managed and self._said is None
        position = micro_steps % self.steps if counts else self._steps_called
        if counts and position == 0 and self.steps > 1 and self.in_window and not self.boundary:
            if not self._cleared:
                raise StateError(
                    f"micro_steps was set to {micro_steps}, where an accumulation of {self.steps} begins, but the gradients of "
                    f"{self._in_cycle} micro-step(s) wait for step(): call engine.zero_grad() before it to drop them"
                )
            discard()
        self._steps_called, self.micro_steps = position, micro_steps

    def cleared(self) -> None:
        """Note a ``zero_grad`` that keeps the gradients so far, because more micro-steps may follow."""
        self._cleared = self.in_window

    def discarded(self) -> None:
        """Note that the gradients since the last optimizer step were discarded: their micro-steps do not count, and another backward may
        follow.
        """
        self.micro_steps -= self._in_cycle
        self._seen_forwards = -1
        self.stepped()

    def backward_failed(self) -> None:
        """Note that the backward begun last failed with an error; the gradients since the last optimizer step are lost."""
        before = self._backwards - 1
        self.discarded()
        self._lost, self._broke = max(before, 0), True

    @property
    def broken(self) -> bool:
        """Return whether the last backward failed, and the caller has not called ``zero_grad`` since."""
        return self._broke or self._lost > 0

    def require_window(self) -> None:
        """Raise if the present optimizer step has lost gradients.

        Raises:
            StateError: A backward failed and its optimizer step had earlier gradients.
        """
        if self._lost:
            raise StateError(
                f"a backward broke off with an error, and the gradients of {self._lost} earlier backward(s) of the same optimizer "
                "step were lost with it: restart the accumulation window with engine.zero_grad()"
            )

    def enter_no_sync(self, steps: bool) -> None:
        """Allow no boundary until ``leave_no_sync``. With ``steps``, calls of ``step`` until then do nothing; otherwise they raise."""
        self._no_sync_depth += 1
        self._refuses_step = not steps

    def leave_no_sync(self) -> None:
        """Undo one ``enter_no_sync``."""
        self._no_sync_depth -= 1
        self.held_back, self._refuses_step = self._refuses_step and self._awaits_step, False

    @property
    def in_no_sync(self) -> bool:
        """Return whether a ``no_sync()`` context is open."""
        return self._no_sync_depth > 0
