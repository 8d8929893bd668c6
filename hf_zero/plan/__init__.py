"""Predict memory, bytes sent and time of a training run before the hardware exists.

``hf-zero plan`` (users' page: docs/plan.md) runs the engine itself on fake tensors. A plan of one configuration goes through these modules:
``command`` has the flags; ``models`` builds the model on the meta device; ``pretended`` makes this process one rank of a world of torch's
fake back end, on a device "planned" that is written in Python, with the attention kernels of a GPU, and fixes which tokens choose which
experts in layers with lists of experts ([Note: known choices]); ``recorder`` is a dispatch mode above torch's ``FakeTensorMode`` that
records each storage ([Note: a storage of a fake tensor]); ``run`` trains two steps of one rank, marks the purpose of each tensor and asks
the saving code for the size of a checkpoint; ``workers`` runs one rank of each stage of a pipeline ([Note: stages of a plan]);
``prediction`` evaluates the recording; ``report`` prints and draws it. ``progress`` shows on stderr that a plan or a search runs.

A search (``--fit``) adds ``candidates`` (the search space), ``costs`` and ``few_blocks`` ([Note: few blocks]; [Note: roofline];
``measure`` times a machine), ``workers`` (processes that run engines), ``planner`` (plans each candidate once), ``search`` ([Note:
exclusion without a plan]) with ``bounds``, ``written`` and ``fit``. ``fsdp_keys`` is the table of FSDP's keys
with our counterparts, from which ``plan --from`` (``fsdp_source`` reads, ``from_fsdp`` translates) and the page docs/coming-from-fsdp.md
are made.

[Note: back ends of a plan] Inside the engine, only code that chooses a back end asks ``planning()`` (``system/planning.py``): kernels
(``native/library.py``), ranks (``comm/process_groups.py``; ``comm/back_end.py`` makes collectives that answer for all ranks), and host
memory (``memory/``). All other code asks an object: ``Collectives.pretended`` where ranks compare values (and where swap files are
opened), and ``has_values(tensor)`` where it reads elements. Models are traced with ordinary tensors (``plan_ignored``). Of the micro-steps
of one accumulation at most three run, because all between the first and the last are equal.
"""
