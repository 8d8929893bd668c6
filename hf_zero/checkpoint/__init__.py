"""Save and load checkpoints; every rank writes its part, and any number of ranks at any ZeRO stage can load them.

An engine calls ``engine_checkpoints``, which calls ``save`` and ``load``, ``snapshots`` for snapshots in host memory ([Note: a snapshot]),
and ``rewinds`` to restore one after a spike ([Note: a rewind]). ``contents`` plans the part of one rank: entries of named files, and
records of the places of parameters in them. The subpackages, in the order in which they import each other:

- ``format/``: the index ``index.json``: file names (``names``), records (``records``), values without pickle (``values``), arithmetic of
  tensor-parallel shards (``tp_shards``), checksums; checks that the parts of an index fit each other (``consistency``) and that its
  numbers are possible (``plausible``)
- ``files/``: tensor files: rows of elements in memory, on NVMe, or zeros (``rows``), reads and writes past the page cache (``disk``),
  ``tensor_writer``, ``tensor_reader`` (verified checksums), ``uploads`` (to an object
    store), ``catalog`` (from parameters to ranges of files)
- ``commit/``: a checkpoint becomes complete on all ranks or on none: ``agreement`` (one outcome for all ranks), ``folders`` (names of
    checkpoints, and which are complete), ``staging`` ([Note: one folder for each save]), ``store_saves`` (in an object store), ``targets``
    (a folder or an object store), ``node_local``, ``background`` (a thread writes a copy of the state, [Note: a save in the background]),
    ``file_exchange`` and ``snapshot_nodes`` (files of one node on another), ``trainer_folders``
- ``state/``: the saved state: ``training_state``, ``module_entries`` ([Note: entries of modules]), ``averages`` of weights,
  ``optimizer_state`` (states divided like the shards), ``param_groups`` (their settings, and which saved group a present one follows),
  ``param_states`` (states of whole parameters), ``rank_states`` (1-bit Adam and LoCo), ``takeover`` (from another optimizer class),
  ``beside`` (random generators and schedulers of a script)
- ``model/``: unsharded weights alone: a state dict (``export``), safetensors files (``model_files``), or a stream of buckets
  (``stream``), to which ``integrations/weight_stream.py`` adds merged adapters
- ``convert/``: conversions from and to other formats through one intermediate form (``source``), whose elements are fetched a window at
  a time; one reader (``pickles``, [Note: our own machine]) reads all pickles

In a background save, the ranks coordinate through files, because a thread must not issue collectives between those of the training loop.
If the last save of a run fails, the process ends with a non-zero exit status ([Note: a status after the end]). Replicas of a shard divide
its writing among them. Units are padded to a multiple of all data-parallel ranks, so shard groups do not change the files of a
checkpoint. See docs/checkpoints.md and docs/checkpoint-format.md.
"""
