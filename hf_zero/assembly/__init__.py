"""Make the parts of an engine from a module and a resolved configuration.

``core/engine.py`` has forward, backward, step, saving and loading, without names of other libraries. It receives its parts
(``EngineParts``), checkpoints and clock included, so that it knows neither files nor profilers nor the configuration.
``deepspeed/engine.py`` is the class users hold: a subclass with DeepSpeed's names, read-only ones from the tables in
``deepspeed/getters.py``, those that do something from ``deepspeed/requests.py``. Libraries attach to ``core/engine.py``.

``assembly/`` makes the parts. ``mesh.py``: the sizes of the axes; ``axes.py``: the ranks that shard, split the model, and share sequences
and experts; ``policies.py``: policies that are computed from several keys (``core/`` gets the configuration only in this form; a feature
above it, such as ``offload/`` or ``profiling/``, gets its own section); ``networks.py``: the collectives of all axes; ``units.py``,
``gradients.py``, ``optimizers.py``, ``parts.py``: the parts themselves; ``reports.py``: log lines and measurements. An
optimizer with its own kind of step provides the step, the exchange of gradients and the clipping in one record (``StepKind``).
``deepspeed/initialize.py`` calls them in order.
"""
