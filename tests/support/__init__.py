"""How the tests are run.

Ranks are processes that live on between jobs (``tests/support/ranks.py``). They are forked once, from a server that has imported torch,
transformers' Trainer and hf_zero, a pool for each number of ranks; each job gets a process group, seeds and launcher variables of its own.
Two measures keep jobs fast: all groups of a rank share one thread of gloo, and the garbage
collector does not scan imported modules (``gc.freeze``, in ranks and in pytest itself). So a job costs only its computation; put cases
that share a model and a reference into one job (``tests/support/matrix.py``). In the fast run properties use fewer examples, the same each
time (``tests/support/drawn.py``), and of a table of cases the rows that its test names run (the mark ``fast_rows``).

``python -m tools.mutants`` plants faults in a copy of the package and names the first test that finds each. Before each release
``python -m tools.config_census VENV/bin/python`` lists the configuration keys of the newest DeepSpeed, installed in an environment of its
own, that the schema does not know (``DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed`` beside torch).

No test depends on the speed of the machine: it waits for an event (``processes.until``), and the limits that end hanging processes are
large (``processes.PATIENCE``). Helpers of one topic are beside its tests: ``tests/parity/fuzzer``, ``tests/parity/tables`` and the
``breadth.py`` of each parallelism, whose tables are on the pages. Helpers of several topics are here:

Processes and ranks
    ranks: Run a function on N gloo ranks, in processes that live on between jobs.
    processes: Start fresh interpreters and commands as a user's shell does, which collects rarely (``start/``); wait for events.
    launches: Run scripts on the ranks of the pool with the variables of a launcher.
    alias_first, preloaded: Imports of the server that ranks are forked from, first and last.
    collective_log, collective_order: Record what ranks issue and wait for; check that it could not hang on NCCL.
    snapshot_runs: A run with snapshots that torchrun starts again after deaths, and the same run without one.
    signalled: Send signals to ranks, and end a run by one.
    memory: Measure resident pages, the peak of a call, and the bytes of tensors.
    reads: Count what is read of safetensors files.
    device_jobs, gpu: Jobs of an engine on a device, under pytest and without it.
    device_axes: Training over tensor, pipeline, expert and sequence parallelism on a device.
    late_skips, context_attention: Steps that a device skips; attention of context parallelism beside PyTorch's.
Comparison with plain PyTorch
    parity: The reference, the same training through the engine, and the checker.
    matrix: Blocks of the parity matrix, one job for each model and precision.
    whole_tensors, zeropp_reference: References of optimizers that need whole tensors, and of ZeRO++.
    offload_runs, host_activations, recomputation, sequences, tp_training, experts: Runs with one feature beside runs without it.
    spikes: Few earlier norms and losses to compare with.
    logged: The messages that hf_zero logs.
    planned: A plan beside what a job of ranks holds and sends.
Models and data
    models: Tiny models of the matrix, with batches.
    zoo, senses: Tiny models of every architecture of transformers: text; images and sound.
    multimodal, fused_losses, skipped_blocks, deep_skips, small_blocks, averaged, residual_layers: Models for one question each.
    zero3: Models that are sharded from construction on.
    checkpoints, background_saves, killed_saves: A model with everything that a checkpoint holds; saves beside training; saves that die.
    stores, s3_server: A store that refuses; a real S3 server behind a proxy that fails.
Libraries
    trainers, tp_trainer, trl_runs, chats: Trainer and TRL inside a rank, and what their scripts are given.
    accelerate_loop, examples, weight_server: Scripts as users write them; the examples; the server of examples/rl.
Tables of cases
    rows, drawn: Small rows in one test, the cells of a large table that the fast run takes; numbers of examples of a property.
    sources, versions: The package's files and their imports; versions of the installed libraries.
"""
