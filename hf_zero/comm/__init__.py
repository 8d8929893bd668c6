"""The process group, axes of ranks, every collective, and what happens when one fails.

``initialize`` begins with one vote of all ranks (``assembly/same_settings.py``) over every resolved key that is not a rank's own
(``config/alike.py``), and the versions of hf_zero and torch, before anything whose order depends on a setting; ``zero.Init`` takes part
in it. The vote over the model (``core/step/agreement.py``) holds the optimizer's class and each group's hyper-parameters too. What
differs is one error on all ranks, with each key, all values and their ranks (``core/step/agreement.py``).

Each boundary begins with one message on the host (``core/step/agreement.py``): a digest of all that must be alike, and what any rank has
to tell. The ranks compare how many micro-steps they have begun, the numbers in their param groups (``core/step/agreement.py``: a
scheduler that differs, a callback that edits one rank's rate), which parameters they train (``core/step/trained_set.py``) and which they
have written (``core/step/written.py``); a rank that skipped a batch ends the run on all ranks, with everybody's number. Where
ranks hold different parts of a model all ranks take part (``Networks.everyone``). A further thing to agree on is one more ``Alike``, or
one more number. A forward that raised on one rank, was caught and is run again with the same values is one micro-step
(``core/engine_parts.py``) and, at stage 3, another pass of the forward in which the others wait ([Note: a forward that is run again]); a
rank that steps or saves instead raises, and so do the others. A backward that breaks off on one rank takes part in what is left of its
collectives, and all ranks raise ([Note: a backward that breaks off on one rank]); with gradient accumulation below stage 3, at the
backward that completes the step. Loops in which ranks make different numbers of steps (``even_batches=False``, torch's ``Join``) are not
served.

The same message carries the number of a signal that a rank has heard (``system/signals.py``, [Note: signals]), so all ranks know of it at
the same step: ``core/preemption.py`` keeps it for an engine, and ``integrations/preemption.py`` ([Note: preemption]) says who saves then
(a script that asks, the engine itself, Trainer, Lightning in ``lightning_signals``) and how all end together. Ranks that hold one model
together vote once more among themselves.

A wait that takes long is told while it lasts: a thread beside the training (``comm/hang_watch.py``, [Note: long waits]) looks where the
other threads are (``comm/standing.py``, ``system/stacks.py``, the only readers of frames) and asks the other ranks through the store.
Where waiting for a collective stops the process (gloo), one that fails or times out raises ``CollectiveError`` with the phase, the unit
and the recent phases of this rank, and the ranks that no longer answer with their hosts: the ranks write once more into the store that
they met in (``comm/roll_call.py``, [Note: roll call]). On nccl ``wait`` orders a stream and raises nothing: PyTorch's watchdog ends the
process with SIGABRT when a collective fails or times out, and the launcher ends the other ranks; ``TORCH_NCCL_BLOCKING_WAIT=1`` brings
the error back. The engine's own groups have the timeout of the default group. Users' page: docs/launch.md.

Nothing outside ``own_files.py`` (on ``folder.py``, an open folder) writes or deletes, and nothing there deletes what is not ours ([Note:
what is written], [Note: what is deleted]); small files of others are read by ``text_file.py`` alone ([Note: bounded reading]).
``tests/house/test_files.py`` counts every other call, with the reasons of the few exceptions.
"""
