"""``hf_zero.initialize``: engines that know of the libraries they are used by. Importing this module attaches the integrations."""

from __future__ import annotations

from hf_zero.build import mesh
from hf_zero.core import engine
from hf_zero.deepspeed.initialize import initialize
from hf_zero.expert_parallel import apply
from hf_zero.integrations.expert_functions import dispatch_in_table
from hf_zero.integrations.idle_saves import stand_before_saves
from hf_zero.integrations.metrics_once import count_samples_once
from hf_zero.integrations.parallelism import claims_of_accelerate
from hf_zero.integrations.preemption import listen_where_wanted, save_by_itself
from hf_zero.integrations.retrain import let_go
from hf_zero.integrations.rotation import keeps_too_few

__all__ = ["initialize"]

engine.on_build += [stand_before_saves, count_samples_once, listen_where_wanted]
engine.on_preempted.append(save_by_itself)
engine.on_destroy.append(let_go)
engine.reasons_to_wait.append(keeps_too_few)
mesh.sources.append(claims_of_accelerate)
apply.tables.append(dispatch_in_table)
