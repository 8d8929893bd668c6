"""How the tests are run.

Ranks are processes that live on between jobs (``tests/support/ranks.py``): forked, for each number of ranks once, from a server that has
imported torch, transformers' Trainer and this package; each job gets a process group, seeds and launcher variables of its own. What would
make jobs slower the longer the suite runs is kept out: all groups of a rank share one thread of gloo, and collections of garbage look
only at what jobs make, not at what was imported (``gc.freeze``, in ranks and in pytest itself). So a job costs what it computes; batch
cases that share a model into one job where they need the same reference (``tests/support/matrix.py``). Properties take fewer examples,
the same each time, in the fast run (``tests/support/drawn.py``). ``python -m tools.mutants`` plants faults in a copy of the package
and names the first test that sees each. Before each release ``python -m tools.config_census VENV/bin/python`` names the
configuration keys of the newest DeepSpeed, installed in an environment of its own, that the schema does not know (``DS_BUILD_OPS=0
DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed`` beside torch).
"""
