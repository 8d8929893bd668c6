"""The process group, axes of ranks, every collective, and the handling of a collective that fails.

``initialize`` begins with one vote of all ranks (``assembly/same_settings.py``) over every resolved key that must be equal on all ranks,
and over the versions of hf_zero and torch, before any step whose order depends on a setting; ``zero.Init`` takes part in it. The vote over
the model (``core/step/agreement.py``) also covers the optimizer's class and each group's hyper-parameters. All differences are one
error on all ranks, with each key, all values and their ranks.

Each boundary begins with one message on the host (``core/step/agreement.py``): a digest of all values that must be equal, and the
reports of any rank. The ranks compare the number of micro-steps they have begun, the numbers in their param groups (a scheduler that
differs, a callback that edits one rank's rate), the parameters they train (``core/step/trained_set.py``) and the parameters they have
written (``core/step/written.py``). A rank that skipped a batch ends the run on all ranks, with every rank's number. Where ranks hold
different parts of a model all ranks take part (``Networks.everyone``). To compare a further value, add one more ``SharedFact``, or one more
number. A forward that raised on one rank, was caught and is run again with the same values is one micro-step
(``core/engine_parts.py``) and, at stage 3, another pass of the forward in which the other ranks wait ([Note: a forward that is run
again]); if the rank steps or saves instead, all ranks raise. A backward that breaks off on one rank still takes part in its remaining
collectives, and all ranks raise ([Note: a backward that breaks off on one rank]); with gradient accumulation below stage 3 they raise at
the backward that completes the step. Loops in which ranks make different numbers of steps (``even_batches=False``, torch's ``Join``) are
not supported.

The same message carries the number of a signal that a rank has received (``system/signals.py``, [Note: signals]), so all ranks know of it
at the same step. ``core/engine_parts.py`` keeps it for an engine, and ``integrations/preemption.py`` ([Note: preemption]) describes who
saves then (a script that checks, the engine itself, Trainer, Lightning in ``lightning_methods``) and how all ranks end together. Ranks
that hold one model together vote once more among themselves.

A long wait is reported while it lasts: a thread beside the training (``comm/hang_watch.py``, [Note: long waits]) observes the other
threads (``comm/rank_status.py``, ``system/stacks.py``, the only readers of frames) and asks the other ranks through the store. Where a wait
for a collective blocks the process (gloo), a collective that fails or times out raises ``CollectiveError``. The error has the phase, the
unit and the recent phases of this rank, and the ranks that no longer answer with their hosts: the ranks write once more into the store
that they met in (``comm/roll_call.py``, [Note: roll call]). On nccl ``wait`` orders a stream and raises nothing: PyTorch's watchdog ends
the process with SIGABRT when a collective fails or times out, and the launcher ends the other ranks; ``TORCH_NCCL_BLOCKING_WAIT=1``
restores the error. The engine's own groups have the timeout of the default group. Users' page: docs/launch.md.
"""
