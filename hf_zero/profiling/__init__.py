"""Measure operations, time, memory and overlap of training steps, and parameters of modules.

The engine calls only ``observe.py``: ``note`` and ``span`` (labels), ``waiting`` (an interval in which this rank waits: around
``Pending.wait``, votes and waits for the host) and ``issued`` (a collective has begun). The calls cost almost nothing unless a profiler
runs or a meter is set. ``Clock.watchers`` are entered around each phase; ``step_metrics`` (tokens, operations by
``costs.ModelOperations``, ``waits``) and ``recordings.RecordedStep`` are watchers. ``recordings`` and ``overlap`` ([Note: time under way])
implement ``hf-zero trace``. ``core/holdings.py`` lists the tensors that an engine keeps, by kind: for plans, for the memory in records,
and for ``assembly/out_of_memory.py``, which ``Engine`` calls when forward, backward or step raise, before anything is freed.
"""
