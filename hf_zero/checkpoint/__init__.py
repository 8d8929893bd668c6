"""Checkpoints: saved by every rank, loaded at any number of ranks and any stage.

``engine_checkpoints`` is what an engine calls; ``save`` and ``load`` are the two ways, ``contents`` says what a rank writes.
``state/`` holds what a checkpoint is made of, ``format/`` how it is described, ``files/`` the tensor files, ``commit/`` how a folder
becomes complete on every rank, ``model/`` whole weights without optimizer, ``convert/`` the checkpoints of others.

``checkpoint/save.py`` and ``load.py`` are the two ways; ``contents.py`` says what a rank writes (rows of named files, and records of
where parameters lie in them). The folders below them, in the order in which they import:

- folder: what it holds
- ``format/``: the index: its names (``names``), records (``records``, read by ``json_records``), values without pickle (``values``), the
  arithmetic of tensor-parallel shards (``tp_shards``); that its parts fit each other (``consistency``) and that a run can have had its
  numbers (``plausible``)
- ``files/``: tensor files: ``rows`` (in memory, on NVMe, or zeros) → ``header``, ``disk`` (past the page cache) → ``tensor_writer``,
  ``tensor_reader`` (verified ranges) → ``catalog`` (names and element ranges as ranges of files)
- ``commit/``: complete or not there at all: ``agreement`` (one outcome for all ranks), ``folders`` (names, and which are complete) →
  ``staging`` ([Note: one folder for each save]) → ``node_local``, ``background`` (a thread writes a copy, [Note: a save in the
  background]); ``trainer_folders``
- ``state/``: what is saved: ``training_state``; ``averages`` (of weights); ``optimizer_state`` (states that lie flat like the shards),
  ``param_states`` (those of whole parameters), ``rank_states`` (1-bit Adam's), ``takeover`` (from another optimizer)
- ``model/``: whole weights alone: a state dict (``export``), files as Hugging Face reads them, or a stream of buckets (``stream``), to
  which ``integrations/weight_stream.py`` adds merged adapters
- ``convert/``: the formats of others, through one intermediate (``source``) whose elements are fetched by the window; all their pickles
  go through one reader (``pickles``, [Note: our own machine])

The ranks of a save in the background talk through files, because a thread must not issue collectives between those of the loop; a last
save that was lost is told by the exit status ([Note: a status after the end]). Replicas of a shard share out what is written of it: units
are padded to a multiple of all data-parallel ranks, so a checkpoint of shard groups has the files of one without them. See
docs/checkpoints.md and docs/checkpoint-format.md.
"""
