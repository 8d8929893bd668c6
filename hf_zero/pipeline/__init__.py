"""Pipeline parallelism: the layers of a model are divided over ranks; every rank runs the model's own forward.

``pipeline/``: ``items`` (modules that one stage runs as a whole) → ``flow_trace``, ``flow`` (for each call, the earlier results that it
depends on through glue alone, from the trace of tensor parallelism) → ``balance``, ``partition`` (``PipelinePlan``: the stage of each call,
the tensors that cross borders, the holders of each parameter) → ``apply`` (divides a model); ``templates`` (shapes of the results of other
stages' modules) → ``own_stages`` ([Note: one forward for all stages]) → ``passes`` ([Note: two passes], [Note: types under autocast]) and
``model_stages`` (one stage as torch's ``schedules`` run it) → ``forward``, which replaces ``model.forward`` ([Note: losses of parts]) until
the last engine of the model is destroyed; ``result_shapes``, ``pending`` (logits that may never be read; hooks on them wait for the
values), ``generation``, ``train``. ``held`` describes a model of which a rank has loaded its own stages alone ([Note: held stages]).
``integrations/stage_loads.py`` does that loading ([Note: reading a stage]); it finds the names in the checkpoint files as expert
parallelism does (``checkpoint_slices``).

The stages are the outermost axis of the ranks (``comm/axes.py``). ``Topology.model`` is all ranks that hold one model together, over
stages and tensor parallelism; ``pipe`` and ``tensor`` are its two parts. Tensor and expert parallelism work on ``Topology.layers``. The
experts of a stage are divided after the stages are divided and before the pipeline replaces the forward (``assembly/axes.py``);
``Topology.parts`` is all ranks that hold one model with its experts. Ranks that hold experts for each other agree on the number of parts,
and on when a kind of batch is new. A parameter of another stage is empty here and in no unit. It is marked as a tensor-parallel shard that
is elsewhere (``core/units/marks.py``, ``is_elsewhere``), so norm, overflow check and checkpoints count it as a part that other ranks
hold. A weight that several stages hold is a unit of its own, whose gradients take one more sum over these stages and the replicas of its
shards (``ReplicatedSum``), and counts once in the norm. Blocks have no hooks in a pipeline: nothing is resharded.

Two properties of the engine exist for pipelines: parameters get several gradients in one backward (``Reducer.piecemeal``), and under a
schedule forwards and backwards take turns in one micro-step (``BackwardPhase.mixed``). ``train.py`` collects such gradients.
``comm/link.py`` sends between two ranks. Under accelerate the stages of a pipeline are given the same samples by
``integrations/pipelines.py``. Users' page: docs/pipeline-parallel.md.
"""
