"""Run the user's optimizer over this rank's part of every unit.

``optim/elementwise.py`` finds what an update of an optimizer depends on: single elements, complete tensors, or all tensors together (which
only stage 0 and one rank can serve). For complete tensors the engine is built with ``core/optimizer/whole_tensors.py`` in place of
``core/optimizer/sharded.py`` ([Note: whole tensors]): masters stay sharded, so all code that reads or writes them is the same. Each
parameter has one owner rank (``owners.py``), which keeps its state and has it in its own shape during a step (``param_states.py``).
``TensorMoves`` (``owners.py``) sends masters and reduced gradients to the owners and new masters back, unit by unit through
``Collectives.exchange_parts``, three exchanges in flight at a time in the same order on every rank. Between steps a parameter of the inner
optimizer is one zero, expanded to its full shape. The state of one parameter is read and written through ``param_states.py``, flat or
complete. ``clones.py`` makes further optimizers of a given one's class and tries them on small tensors.
``checkpoint/state/param_states.py`` saves the owners' states, by parameter. Page for users: docs/optimizers.md.
"""
