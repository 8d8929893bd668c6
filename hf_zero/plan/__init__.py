"""Plans a run before there is hardware: what it takes, what it sends, how long it takes.

``plan/`` runs the engine itself (``hf-zero plan``, users' page: docs/plan.md). ``--fit``: ``candidates`` (what may be chosen) →
``costs``, ``few_blocks`` ([Note: few blocks]) and ``rates`` ([Note: roofline]; ``measure`` times a machine) → ``workers`` (processes that
run engines) → ``planner`` (each candidate once) → ``search`` ([Note: what need not be planned]) → ``written``, ``fit``. ``models`` and
``trainable`` build a module on the meta device; ``pretended`` makes this process rank 0 of a world of torch's fake back end, on a device
"planned" that is written in Python; ``books`` is a dispatch mode above torch's ``FakeTensorMode`` that writes down each storage ([Note: a
storage of a fake tensor]); ``attention`` gives the pretended device the kernels of a GPU and models the masks of a run; ``choices`` lets
layers with lists of experts know which tokens chose which ([Note: known choices]); ``run`` trains two steps of one rank and marks what
each tensor is for and asks the saving code for the size of a checkpoint; ``stages`` runs one rank of each stage of a pipeline
([Note: stages of a plan]); ``prediction`` reads the books, ``report`` prints and draws, ``command`` has the flags. ``fsdp_keys`` is the
one table of FSDP's keys beside ours, from which ``plan --from`` (``fsdp_source`` reads, ``from_fsdp`` translates) and the page
docs/coming-from-fsdp.md are made.

[Note: back ends of a plan] Of the engine only the code asks ``planning()`` (``system/planning.py``) that chooses a back end: the kernels
(``native/library.py``), the ranks (``comm/process_groups.py``; ``comm/back_end.py`` makes collectives that answer for all ranks), and host
memory (``memory/``). All other code asks an object: ``Collectives.pretended`` where ranks compare what they have (and where swap files are
opened), and ``has_values(tensor)`` where it looks at elements. A model is traced with ordinary tensors (``looking_aside``). Of an
accumulation three micro-steps run; those between the first and the last are alike.
"""
