"""Operations, time and parameters of a model's modules.

Three questions of ``observe.py`` are all that the engine asks on the way: ``note`` and ``span`` (labels), ``waiting`` (a stretch in which
this rank does nothing else; around ``Pending.wait``, votes and waits for the host) and ``issued`` (a collective is under way); free
unless a profiler runs or a meter is set. ``Clock.watchers`` are entered around each phase. ``profiling/step_metrics`` (tokens, operations
by ``costs.ModelOperations``, ``waits``, ``device_peaks``) and ``recorded_step`` are watchers; ``recordings`` → ``overlap`` ([Note: time
under way]) → ``overlap_report`` is ``hf-zero trace``. ``core/holdings.py`` walks over what an engine keeps, by kind: the books of a plan,
the memory of a record, and ``assembly/out_of_memory.py``, which ``Engine`` calls when forward, backward or step raise, before anything is
freed.
"""
