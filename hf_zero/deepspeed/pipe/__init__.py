"""DeepSpeed's pipelines: models that are lists of layers, divided over stages.

``deepspeed/pipe/`` is DeepSpeed's interface to pipelines (docs/pipeline-module.md): ``topology`` (ranks as coordinates), ``grid`` (groups
of ranks), ``layer_spec``, ``building`` ([Note: layers of other stages]), ``run_of_layers`` (the layers
of a stage, with their recomputation) → ``module``; ``batches`` (what an iterator gives), ``work`` (what a stage does with one batch;
[Note: what crosses a border]) → ``engine``. A ``PipelineModule`` says itself who holds what (``pipeline/self_divided.py``), so it is not
traced and its forward stays as it is; parameters of other stages are empty and marked as those of any divided model.
``pipeline/schedules.py`` is a stage in the hands of torch's schedules whose parts may have any shapes, of a list of layers or of a
divided model, ``pipeline/train.py`` (``train_batch``, ``whole_step``) what makes their forwards and backwards one optimizer step;
``pipeline/train.py`` reads a batch on all ranks or on none. Running statistics are brought together before a save.
"""
