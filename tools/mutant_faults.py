"""The faults that ``tools/mutants.py`` plants: one wrong line each, and the test files that should find it."""

from __future__ import annotations

from dataclasses import dataclass

TRACE = "tests/core/test_trace.py"
MATRIX = "tests/parity/test_parity_matrix.py"
ACCUMULATION = "tests/parity/test_parity_accumulation.py"
NORM = "tests/core/test_engine_grad_norm.py"
ORDER = "tests/core/test_backward_order.py"
STAGES = "tests/core/test_stages.py"
POLICY = "tests/core/test_gradient_policy.py"
SKIPPED = "tests/parity/test_parity_skipped_block.py"
SCALE = "tests/core/test_engine_loss_scale.py"
RESUME = "tests/checkpoint/test_checkpoint_resume.py"
FILES = "tests/checkpoint/test_checkpoint_files.py"
FOLDERS = "tests/checkpoint/test_checkpoint_folders.py"
GOLDEN = "tests/checkpoint/test_checkpoint_golden.py"
FAULTY = "tests/checkpoint/test_checkpoint_faults.py"
RESOLVE = "tests/config/test_config_resolve.py"
SPELLING = "tests/config/test_config_spelling.py"
ELASTIC = "tests/config/test_config_elastic.py"
VALUES = "tests/checkpoint/test_checkpoint_values.py"
BUFFERS = "tests/parity/test_parity_written_buffers.py"
UNUSED = "tests/core/test_unused_parameters.py"


@dataclass(frozen=True)
class Fault:
    """One wrong line of the package.

    Attributes:
        name: Name that describes the fault.
        file: Module, below ``hf_zero/``.
        old: Text of the module; it must occur exactly once.
        new: Text that replaces it.
        tests: Test files to run, in this order; the first failure ends the search.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _in(file: str, *faults: tuple[str, str, str, tuple[str, ...]]) -> list[Fault]:
    return [Fault(name, file, old, new, tests) for name, old, new, tests in faults]


FAULTS: tuple[Fault, ...] = (
    *_in(
        "core/units/layout.py",
        (
            "the buffer is not padded",
            "padded = max(round_up(offset, multiple), multiple)",
            "padded = offset",
            ("tests/launch/test_world_sizes.py",),
        ),
        (
            "padding is no gap",
            "stops = [*(slot.offset for slot in self.slots), self.padded_numel]",
            "stops = [*(slot.offset for slot in self.slots), self.numel]",
            (POLICY, NORM, TRACE, MATRIX),
        ),
        (
            "shards overlap by one",
            "Range(rank * self.shard_numel, (rank + 1) * self.shard_numel)",
            "Range(rank * self.shard_numel, (rank + 1) * self.shard_numel + 1)",
            (TRACE, MATRIX),
        ),
        (
            "groups are not sorted",
            "key=lambda index: groups[index]))",
            "key=lambda index: 0))",
            ("tests/parity/test_parity_groups.py", MATRIX),
        ),
    ),
    *_in(
        "core/stages.py",
        (
            "stage 2 defers",
            "2: StagePolicy(2, optimizer_sharded=True, parameters_sharded=False, reduces_each_micro_step=True, allows_deferral=False)",
            "2: StagePolicy(2, optimizer_sharded=True, parameters_sharded=False, reduces_each_micro_step=True, allows_deferral=True)",
            (STAGES, ACCUMULATION, MATRIX),
        ),
        (
            "stage 1 reduces at the boundary",
            "1: StagePolicy(1, optimizer_sharded=True, parameters_sharded=False, reduces_each_micro_step=True,",
            "1: StagePolicy(1, optimizer_sharded=True, parameters_sharded=False, reduces_each_micro_step=False,",
            (STAGES, ACCUMULATION, TRACE),
        ),
        (
            "stage 3 keeps parameters whole",
            "3: StagePolicy(3, optimizer_sharded=True, parameters_sharded=True,",
            "3: StagePolicy(3, optimizer_sharded=True, parameters_sharded=False,",
            (TRACE,),
        ),
    ),
    *_in(
        "core/step/grad_norm.py",
        (
            "norm of this rank only",
            "    if sharded:\n        together = sums",
            "    if not sharded:\n        together = sums",
            (NORM, MATRIX),
        ),
        (
            "no epsilon in the clip factor",
            "torch.clamp(max_norm / (norm + EPSILON), max=1.0)",
            "torch.clamp(max_norm / norm, max=1.0)",
            (NORM, MATRIX),
        ),
        (
            "clipping enlarges small gradients",
            "torch.clamp(max_norm / (norm + EPSILON), max=1.0)",
            "max_norm / (norm + EPSILON)",
            (NORM, MATRIX),
        ),
        (
            "copies of the model axis count twice",
            "torch.stack([square / count for",
            "torch.stack([square for",
            (NORM, "tests/tensor_parallel/test_tp_training.py"),
        ),
        (
            "the rest of a shard is forgotten",
            "by_count[alike] += _rest(shard, [part for part, _ in copies])",
            "by_count[alike] += []",
            (NORM, "tests/tensor_parallel/test_tp_training.py"),
        ),
        (
            "the last non-finite parameter is named",
            "return min(everywhere)[1]",
            "return max(everywhere)[1]",
            (NORM, "tests/parity/test_parity_overflow.py"),
        ),
    ),
    *_in(
        "core/step/buffers.py",
        ("each rank keeps the buffers that training writes", "        if news:\n            self._agree()\n", "", (BUFFERS,)),
        (
            "writes that torch does not count are overlooked",
            "self._found.add(name)\n        return FOUND",
            "self._found.add(name) if not reads else None\n        return FOUND",
            (BUFFERS,),
        ),
        (
            "caches are sent",
            "buffers.keys() - module._non_persistent_buffers_set",
            "buffers.keys()",
            (BUFFERS,),
        ),
        ("buffers that were loaded again are sent", "return self.sum != before or (", "return True or (", (BUFFERS,)),
        ("buffers of other shapes are sent", "if alike and form is not None and", "if form is not None and", (BUFFERS,)),
        ("buffers of experts are sent", "and not name.startswith(apart)", "", ("tests/expert_parallel/test_expert_kinds.py",)),
    ),
    *_in(
        "core/step/trained_units.py",
        (
            "weight decay and momentum change parameters without a gradient",
            "return MISSES if any(self._misses(entry)",
            "return 0 if any(self._misses(entry)",
            (UNUSED,),
        ),
        (
            "a parameter that has rested never has a gradient again",
            "        if any(rested):\n            return RESTED\n",
            "",
            (UNUSED, "tests/parity/test_parity_trained_set.py"),
        ),
    ),
    *_in(
        "core/step/unused.py",
        (
            "weight decay without a gradient has no warning",
            "    if names:\n        shown = ",
            "    if False:\n        shown = ",
            (UNUSED,),
        ),
    ),
    *_in(
        "core/step/equal_copies.py",
        (
            "the ranks of a layer may have other losses",
            "return max(numbers) - min(numbers) > max(",
            "return False and max(numbers) - min(numbers) > max(",
            ("tests/tensor_parallel/test_tp_equal_copies.py",),
        ),
    ),
    *_in(
        "expert_parallel/listed.py",
        (
            "the first run of a list of experts writes buffers",
            "with _unchanged_buffers(self._others):",
            "with nullcontext():",
            ("tests/expert_parallel/test_expert_kinds.py",),
        ),
    ),
    *_in(
        "checkpoint/state/plain_state.py",
        (
            "an optimizer's state from before initialize is lost",
            "    inner.state.clear()\n    return found\n",
            "    inner.state.clear()\n    return None\n",
            ("tests/checkpoint/test_optimizer_state_dicts.py",),
        ),
    ),
    *_in(
        "core/step/step.py",
        (
            "the loss scale stays in the update",
            "factor = clip_factor(norm, max_norm) / self.scaler.scale",
            "factor = clip_factor(norm, max_norm)",
            (MATRIX,),
        ),
        (
            "the norm carries the loss scale",
            "else scaled_norm / self.scaler.scale",
            "else scaled_norm",
            (MATRIX, "tests/parity/test_parity_overflow.py"),
        ),
        (
            "an overflow is not noticed",
            "overflow = finite is not None and flag is None and not bool(finite)",
            "overflow = False",
            ("tests/parity/test_parity_overflow.py",),
        ),
        (
            "the host does not read whether the device skipped",
            "if not finite.read():",
            "if False:",
            ("tests/core/test_late_skip.py",),
        ),
        (
            "gradients of a step that is skipped are clipped",
            "factor = torch.where(flag, factor, 1.0 / self.scaler.scale)",
            "pass",
            ("tests/core/test_late_skip.py",),
        ),
        ("gradients are not cleared", "        self.reducer.clear(shows=keeps)\n", "", (TRACE, MATRIX)),
        (
            "updated shards are not waited for",
            "                if spread is not None:\n                    spread.wait()",
            "                if spread is None:\n                    break",
            (TRACE, MATRIX),
        ),
        (
            "whole blocks stay stale over an update",
            "        self.runtime.reshard_for_update()\n",
            "",
            (TRACE,),
        ),
        (
            "ranks are not compared at a step",
            "same_micro_steps(self.runtime.micro_steps)",
            "same_micro_steps(0)",
            ("tests/core/test_same_pace.py",),
        ),
        (
            "hyper-parameters are not compared at a step",
            ", same_groups(self.optimizer.inner), same",
            ", same",
            ("tests/core/test_same_settings.py",),
        ),
    ),
    *_in(
        "core/step/accumulation.py",
        ("one micro-step too many", "+ 1 >= self.steps", "+ 1 > self.steps", (ACCUMULATION, TRACE)),
        (
            "no_sync is ignored",
            "        if self._no_sync_depth:\n            return False\n",
            "",
            (ACCUMULATION, "tests/facade/test_ds_engine_names.py"),
        ),
        (
            "what the caller says is ignored",
            "            return self._said",
            "            return True",
            (ACCUMULATION, "tests/facade/test_ds_engine_names.py"),
        ),
        (
            "a cycle never begins anew",
            "        self._in_cycle = self._steps_called = self._backwards = self._lost = 0\n",
            "        self._in_cycle = self._backwards = self._lost = 0\n",
            (ACCUMULATION, TRACE),
        ),
    ),
    *_in(
        "core/step/precision.py",
        ("hysteresis counts one more", "if self._tolerance > 1:", "if self._tolerance >= 1:", (SCALE,)),
        ("the scale grows a step early", "counted = self._good_steps - 1", "counted = self._good_steps", (SCALE,)),
        ("the scale falls below its least", "max(self.scale / FACTOR, self.min_scale)", "self.scale / FACTOR", (SCALE,)),
    ),
    *_in(
        "core/optimizer/state_store.py",
        (
            "the device is not told to skip",
            "finite.logical_not().float()",
            "finite.float() * 0.0",
            ("tests/core/test_late_skip.py",),
        ),
    ),
    *_in(
        "core/optimizer/held_params.py",
        (
            "ids of parameters stay in tables",
            "if type(item) is int and item in self._others:",
            "if False:",
            ("tests/optim/test_held_params.py",),
        ),
    ),
    *_in(
        "core/optimizer/clones.py",
        (
            "arguments of a constructor have their defaults in trials",
            "        if states_by_param(optimizer):\n            built = build_anew",
            "        if True:\n            built = build_anew",
            ("tests/optim/test_optim_elementwise.py",),
        ),
    ),
    *_in(
        "core/optimizer/segments.py",
        (
            "a state loses the memory that it took",
            "                    part_states(segment.state, values)\n",
            "",
            ("tests/optim/test_optim_attributes.py",),
        ),
    ),
    *_in(
        "core/schedule/watched_outputs.py",
        (
            "hooks below a forward keep it",
            "register_hook(hook if lower else above)",
            "register_hook(above)",
            ("tests/core/test_dropped_engine.py",),
        ),
    ),
    *_in(
        "core/schedule/reducer.py",
        ("two reductions in flight", "_IN_FLIGHT = 1", "_IN_FLIGHT = 2", (TRACE, ORDER, "tests/comm/test_nccl_order.py")),
        (
            "late gradients are forgotten",
            'errors = self._reduce_late(answers(), error) if answers is not None else ""',
            'errors = ""',
            (ORDER, "tests/parity/test_parity_shared_block.py", SKIPPED),
        ),
        (
            "units go when they are complete, in any order",
            "if self._order is not None and not self._order.allows(self._sent):",
            "if False:",
            (ORDER, "tests/comm/test_nccl_order.py"),
        ),
        (
            "places are not forced",
            "            while self._sent < count:",
            "            while self._sent < count and self._queue[self._sent].done:",
            (ORDER, "tests/comm/test_nccl_order.py"),
        ),
        (
            "reduced first unit first",
            "for entry in self.gradients[::-1] if not entry.unit.rests]",
            "for entry in self.gradients if not entry.unit.rests]",
            (TRACE, ORDER),
        ),
    ),
    *_in(
        "core/schedule/reducer.py",
        (
            "a place is one off",
            "user = position if reach <= 0 else unshards[first - 1] if first else 0",
            "user = position if reach <= 0 else unshards[first] if first else 0",
            (ORDER, "tests/comm/test_nccl_order.py", TRACE),
        ),
        ("a reduction opens too early", "unshards[passed - 1] + 1 if passed else 0", "unshards[passed - 1] if passed else 0", (ORDER,)),
    ),
    *_in(
        "core/schedule/gradients.py",
        (
            "holes keep what was there",
            "        if not all(self._written):\n",
            "        if False:\n",
            (POLICY, SKIPPED, "tests/core/test_unused_parameters.py"),
        ),
        (
            "gaps keep what was there",
            "        for start, stop in self._unit.layout.gaps:\n            flat[start:stop].zero_()\n",
            "",
            (POLICY, TRACE, MATRIX),
        ),
        (
            "a second gradient overwrites",
            "(added if written[index] else copied)",
            "(copied)",
            (ACCUMULATION, POLICY, "tests/parity/test_parity_tied.py"),
        ),
        (
            "a reduction is not waited for",
            "reduction.message, reduction.under_way.received()",
            "reduction.message, reduction.message[: self.unit.layout.shard_numel].clone()",
            (TRACE, MATRIX),
        ),
        (
            "accumulated in the message's type",
            "dtype = policy.accumulation_dtype if keep_wide else",
            "dtype = layout.dtype if keep_wide else",
            (ACCUMULATION, POLICY),
        ),
        (
            "kept gradients of an incomplete unit are lost",
            "        self._write_kept()\n        # Elements",
            "        # Elements",
            (SKIPPED, POLICY, "tests/core/test_unused_parameters.py"),
        ),
    ),
    *_in(
        "core/schedule/gradient_sums.py",
        ("no division behind the sum", "received.mul_(factor)", "received.mul_(1.0)", (POLICY, MATRIX)),
    ),
    *_in(
        "core/schedule/schedule.py",
        (
            "skipped blocks are not joined",
            "        self._pass.finish()\n        while self._votes",
            "        while self._votes",
            (SKIPPED, ORDER),
        ),
        (
            "reuse distance counts half",
            "near = 2 * behind + block.numel",
            "near = behind + block.numel",
            (ORDER, "tests/parity/test_parity_gather_limits.py", TRACE),
        ),
        (
            "blocks in use are released",
            "if not (block.open or block.kept or block.read_elsewhere or stays):",
            "if not (block.kept or block.read_elsewhere or stays):",
            ("tests/parity/test_parity_shared_block.py", SKIPPED, ORDER),
        ),
    ),
    *_in(
        "core/schedule/block.py",
        (
            "nothing is prefetched",
            "                if first and self._under_way:\n                    return\n",
            "                return\n",
            (TRACE,),
        ),
    ),
    *_in(
        "core/schedule/block.py",
        (
            "prefetch ignores what is live",
            " or self.live + block.numel > self._limits.max_live_parameters:",
            ":",
            ("tests/parity/test_parity_gather_limits.py", ORDER),
        ),
    ),
    *_in(
        "core/units/whole_buffer.py",
        (
            "tensors taken out of a gather die",
            "if for_autograd or (leave and self._is_held()) or not",
            "if for_autograd or not",
            ("tests/facade/test_ds_gathered.py",),
        ),
        ("assigned data is lost", "            view.copy_(param.data)\n", "", ("tests/facade/test_param_data.py",)),
    ),
    *_in(
        "comm/collectives.py",
        (
            "a vote hears half of the ranks",
            "[*range(1, self.world)]",
            "[*range(1, self.world, 2)]",
            ("tests/comm/test_ranks.py", "tests/core/test_same_pace.py", "tests/comm/test_comms_log.py"),
        ),
    ),
    *_in(
        "comm/direct_exchange.py",
        (
            "peers get each other's part",
            "lambda peer: host[peer * numel : (peer + 1) * numel], lambda peer: parts[peer]",
            "lambda peer: host[own], lambda peer: parts[peer]",
            (TRACE, MATRIX),
        ),
        (
            "the last rank is not added",
            "for part in parts[2:]:",
            "for part in parts[2:-1]:",
            ("tests/comm/test_ranks.py", "tests/launch/test_world_sizes.py", MATRIX),
        ),
        (
            "16-bit parts are added in 16 bit",
            "total = parts[0].to(dtype).add_(parts[1])",
            "total = parts[0].add(parts[1]).to(dtype)",
            (MATRIX, "tests/parity/test_parity_precision.py"),
        ),
        (
            "bytes are counted twice",
            "self.sent_bytes += message.numel() * message.element_size()",
            "self.sent_bytes += 2 * message.numel() * message.element_size()",
            (TRACE,),
        ),
    ),
    *_in(
        "config/batch.py",
        ("accumulation ignores the ranks", "max(1, total // (micro * world_size))", "max(1, total // micro)", (RESOLVE,)),
        ("sizes that do not fit pass", "if batch.total != product:", "if False:", (RESOLVE,)),
    ),
    *_in(
        "config/auto.py",
        ("prefetch is a tenth", "int(0.9 * hidden * hidden)", "int(0.09 * hidden * hidden)", (RESOLVE,)),
        (
            "rates may contradict",
            '"optimizer.params.lr": AutoRule(("learning_rate",), must_match=True)',
            '"optimizer.params.lr": AutoRule(("learning_rate",))',
            (RESOLVE,),
        ),
    ),
    *_in(
        "config/resolve.py",
        (
            "overlap_comm is off",
            'zero["overlap_comm"] = True',
            'zero["overlap_comm"] = False',
            (RESOLVE, "tests/config/test_config_schema.py"),
        ),
        (
            "refusals are not looked for",
            '    check_refusals(data, ZeroConfig, "", problems)\n',
            "",
            (SPELLING,),
        ),
        ("mismatches are not looked for", "    if match_sources:\n", "    if False:\n", (RESOLVE,)),
    ),
    *_in(
        "config/spelling.py",
        ("cpu_offload means nothing", 'return block, {"device": "cpu"} if on else None', "return block, None", (SPELLING,)),
        (
            "unknown keys pass",
            "        if guess is None and section.free_keys and arguments is None:",
            "        if guess is None:",
            (SPELLING,),
        ),
    ),
    *_in(
        "config/elastic.py",
        (
            "the smaller micro batch",
            "sorted(section.micro_batch_sizes, reverse=True), total, world_size) if world_size",
            "sorted(section.micro_batch_sizes), total, world_size) if world_size",
            (ELASTIC,),
        ),
        ("a divisor is left out", "if divisor <= most]", "if divisor < most]", (ELASTIC,)),
    ),
    *_in(
        "checkpoint/files/catalog.py",
        (
            "the last rank's part is left out",
            "(wanted.stop - 1) // shard_numel + 1)",
            "(wanted.stop - 1) // shard_numel)",
            (RESUME, GOLDEN),
        ),
        ("parts begin one off", "part.start - rank * shard_numel,", "part.start - rank * shard_numel + 1,", (RESUME, GOLDEN)),
    ),
    *_in(
        "checkpoint/commit/folders.py",
        (
            "a folder without marker is complete",
            "    if not (folder / MARKER_FILE).is_file():\n        return None\n    number",
            "    number",
            (FAULTY, FOLDERS),
        ),
        ("a damaged index passes", "    if digest(text) != expected:\n", "    if False:\n", (FAULTY, FOLDERS)),
        (
            "the oldest is the newest",
            "key=lambda item: int(numbers[item[0]][1]), reverse=True)",
            "key=lambda item: int(numbers[item[0]][1]))",
            (FAULTY, FOLDERS),
        ),
    ),
    *_in(
        "checkpoint/load.py",
        (
            "names are not compared",
            "        if request.strict:\n            self._check_names()\n",
            "",
            (RESUME, FAULTY, "tests/checkpoint/test_checkpoint_options.py"),
        ),
        ("16-bit shards are not refreshed", "        _all_gather_updated(state)\n        for", "        for", (RESUME,)),
        (
            "the loss scale starts anew",
            "state.scaler.load_state_dict(self._decoder.decode(self.index.scaler))",
            "pass",
            (RESUME, VALUES, "tests/checkpoint/test_checkpoint_options.py"),
        ),
        (
            "the scheduler starts anew",
            "state.scheduler.load_state_dict(self._scheduler)",
            "pass",
            (RESUME, "tests/checkpoint/test_checkpoint_options.py"),
        ),
        (
            "buffers of another shape pass",
            "if shape != wanted.shape:",
            "if False:",
            ("tests/checkpoint/test_checkpoint_buffers.py",),
        ),
    ),
    *_in(
        "checkpoint/files/catalog.py",
        (
            "a rank without an expert counts as a file without its states",
            "if part.tp_shard.dim is not None and not part.tp_shard.numel:",
            "if False:",
            ("tests/expert_parallel/test_moe_layer.py",),
        ),
    ),
    *_in(
        "checkpoint/convert/hugging_face.py",
        (
            "files of the former model stay beside the new ones",
            "for name in former - {",
            "for name in set() - {",
            ("tests/checkpoint/test_checkpoint_convert.py",),
        ),
    ),
    *_in(
        "checkpoint/files/tensor_reader.py",
        ("the header's checksum is not compared", "if digits_of(header) != record.header_crc32:", "if False:", (FAULTY, FILES)),
        ("a short file passes", "    if found != expected:\n", "    if False:\n", (FAULTY, FILES)),
    ),
    *_in(
        "checkpoint/commit/staging.py",
        (
            "another process' folder is completed",
            "    if Process.of_json(writer) != Process.own():\n",
            "    if False:\n",
            (FOLDERS, "tests/checkpoint/test_checkpoint_writes.py"),
        ),
        ("foreign folders are replaced", "    _refuse_foreign(save_dir / tag)\n", "", (FOLDERS,)),
    ),
    *_in(
        "core/step/spikes.py",
        (
            "spikes between usual steps are counted together",
            "            self.consecutive = 0\n            return False",
            "            return False",
            ("tests/parity/test_parity_spikes.py",),
        ),
    ),
    *_in(
        "core/step/written.py",
        (
            "a gather of old values passes",
            "                unit.derived.require_current(unit.name)\n",
            "",
            ("tests/parity/test_parity_secondary.py",),
        ),
    ),
    *_in(
        "core/step/accumulation.py",
        (
            "a boundary is set where every step updates",
            "        if not self.managed:\n            raise",
            "        if False:\n            raise",
            (ACCUMULATION,),
        ),
    ),
    *_in(
        "core/schedule/gathered_parameters.py",
        (
            "loaded units stay whole until the end",
            "            entered.pop(module).__exit__(None, None, None)\n",
            "            pass\n",
            ("tests/facade/test_ds_loading.py",),
        ),
    ),
    *_in(
        "offload/file_states.py",
        (
            "small sub-groups are not enlarged",
            "max(self.most_numel, LEAST_NUMEL)",
            "self.most_numel",
            ("tests/offload/test_offload_state.py",),
        ),
    ),
    *_in(
        "core/model_init.py",
        (
            "a plan warns of the model that it built",
            " and not is_fake(param)",
            "",
            ("tests/plan/test_plan_command.py",),
        ),
    ),
    *_in(
        "plan/run.py",
        (
            "the last micro-step of a plan makes no update",
            "                if left:\n",
            "                if False:\n",
            ("tests/plan/test_plan_real.py",),
        ),
    ),
)
