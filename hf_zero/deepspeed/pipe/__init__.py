"""Implement DeepSpeed's pipelines: models that are lists of layers, divided over stages.

The page is docs/pipeline-module.md. Modules: ``topology`` (ranks as coordinates), ``grid`` (groups of ranks), ``building``
([Note: layers of other stages]) → ``module`` (with the layers of a stage, and their recomputation); ``work`` (micro-batches from an
iterator, and the forward of a stage for one batch; [Note: what crosses a border]) → ``engine``. A
``PipelineModule`` itself assigns layers to stages (``pipeline/apply.py``), so it is not traced, and its forward does not change.
Parameters of other stages are empty and marked like those of any divided model. ``pipeline/schedules.py`` makes a stage for torch's
pipeline schedules whose micro-batches may have any shapes, from a list of layers or a divided model. ``pipeline/train.py``
(``train_batch``, ``whole_step``) makes one optimizer step of their forwards and backwards, and reads a batch on all ranks or on none.
Running statistics of all stages are combined before a save.
"""
