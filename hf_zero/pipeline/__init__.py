"""Pipeline parallelism: a model divided by layers over ranks, its own forward run on every one of them.

``pipeline/``: ``items`` (what a stage runs as a whole) → ``flow_trace``, ``flow`` (which results each call is made of through glue alone,
from the trace that tensor parallelism has) → ``balance``, ``partition`` (``PipelinePlan``: who runs which calls, what crosses borders,
who holds which parameters) → ``apply`` (divides a model); ``templates`` (shapes of what other stages' modules return) → ``own_stages``
([Note: one forward for all stages]) → ``border_types`` ([Note: types under autocast]), ``passes`` ([Note: two passes]) and
``model_stages`` (a stage as ``schedules``, which are torch's, run it) → ``forward``, which stands in the place of ``model.forward``
([Note: losses of parts]) until its last engine is destroyed; ``result_shapes``, ``pending`` (logits that nobody may read; hooks wait for
them), ``generation``, ``train``, ``limits``. ``held`` is a model of which a rank has read its own stages ([Note: held stages]); what is
read is ``integrations/stage_loads.py``'s ([Note: reading a stage]), which finds the names in the files as expert parallelism does
(``checkpoint_slices``).

The stages are the outermost axis of the ranks (``comm/axes.py``). ``Topology.model`` is all ranks that hold one model together, stages
and tensor parallelism; ``pipe`` and ``tensor`` are its two parts, and ``Topology.layers`` is what tensor and expert parallelism work
with. The experts of a stage are divided between dividing its layers and putting the pipeline in the place of the forward
(``assembly/axes.py``); ``Topology.parts`` is all ranks that hold one model with its experts. Ranks with each other's experts agree on the
number of parts, and on when a kind of batch is new. A parameter of another stage is empty here and marked as a tensor-parallel shard that
is elsewhere (``core/units/tp_shard.py``, ``is_elsewhere``), so norm, overflow and checkpoints know it as a part of the whole that others
hold; it is in no unit. A weight that several stages hold is a unit of its own, whose gradients take one more sum over these stages and
the replicas of its shards (``ReplicatedSum``), and counts once in the norm. Blocks have no hooks in a pipeline: nothing is resharded.

The engine knows of pipelines in two places: parameters get several gradients in one backward (``Reducer.piecemeal``), and under a schedule
forwards and backwards take turns in one micro-step (``BackwardPhase.mixed``). ``added_in_place.py`` collects such gradients.
``comm/link.py`` sends between two ranks. Under accelerate the stages of a pipeline are given the same samples by
``integrations/pipelines.py``. Users' page: docs/pipeline-parallel.md.
"""
