"""The user's optimizer over this rank's part of every unit.

``optim/elementwise.py`` tells what an optimizer looks at: single elements, whole tensors, or all tensors together (which only stage 0 and
one rank have). For the last two the engine is built with ``core/optimizer/whole_tensors.py`` in place of ``core/optimizer/sharded.py``
([Note: whole tensors]): masters stay sharded, so all that reads or writes them is the same; each parameter has one owner (``owners.py``),
which keeps its state and sees it in its own shape during a step (``owner_states.py``); ``tensor_moves.py`` brings masters and reduced
gradients there and new masters back, unit by unit through ``Collectives.exchange_parts``, three exchanges under way at a time in the same
order on every rank. Between steps a parameter of the inner optimizer is one zero under its full shape. What an optimizer keeps for one
parameter is read and written through ``param_states.py``, flat or whole. ``clones.py`` makes further optimizers of a given one's class
and tries them on small tensors. ``checkpoint/state/param_states.py`` saves what the owners keep, by parameter. Users' page:
docs/optimizers.md.
"""
