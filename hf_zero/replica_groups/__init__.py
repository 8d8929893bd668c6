"""Replica groups: shard groups that are started each by a launcher of its own, so that one can die and return while the others train.

[Note: replica groups] A replica group is one job of torchrun (or another launcher): its ranks shard the model states among them, with all
of hf_zero as in any other job. The groups know each other through torchft: its lighthouse (one process of the cluster) says at the begin of
each optimizer step which groups take part, and its process group is made anew when they change. What hf_zero adds:

* Gradients. Each group reduces its gradients as without other groups; at the boundary each rank averages its shards over the ranks with the
  same number in all groups. Every group counts alike. If a group dies meanwhile, the others have their own shards still, and average them
  again without it: no forward or backward is repeated (``groups.ReplicaGroups.average``).
* Votes. A step is taken if all ranks of a group have the complete average, which torchft's manager decides. A group that could not, while
  another did take the step, gets the state after it.
* States. A group that comes back, or has fallen behind, gets a checkpoint through host memory: rank k of a group that has the newest state
  writes its files and sends them to rank k (``transfer``).
* Data. Batches are numbered. A number that was given to a group that dies is given to another one, and counts as taken when a step that
  contains it is (``sampler``).
* History. Each group carries a digest of all steps and who took part in each. Two groups of the same step with different digests have
  trained apart (a group was frozen while the others went on); the second takes the first one's state.
"""
