"""Each of these tests fails when the package has the fault it is there for.

Faults are put into the modules of the test's process and of every process it starts (`seeded/`).
They replace public functions, methods and classes, or what a module imports, so that a private
function can be renamed; `test_tests.py` lists the private names that are left.
Faults of the planner, the packer, the allocator and the scheduler are seeded beside their tests.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FAULTS = {
    "a place in a shard is one pack behind": (
        "packing/sources/test_source_raises.py", "nopad.packing.readers.shard_reader",
        "right = ShardReader.next_pack\n"
        "def next_pack(self):\n"
        "    pack = right(self)\n"
        "    if pack is not None:\n"
        "        pack.cursor['packs_since'] = max(0, pack.cursor['packs_since'] - 1)\n"
        "    return pack\n"
        "ShardReader.next_pack = next_pack",
    ),
    "empty packs are packs of a longer pass": (
        "packing/test_pass_end.py::"
        "test_a_longer_pass_has_the_packs_that_empty_ones_stood_for",
        "nopad.packing.readers.planned",
        "right = PlannedPacks.resume_position\n"
        "PlannedPacks.resume_position = lambda self, state, epochs: replace(\n"
        "    right(self, state, epochs), index=state['position']['index'])",
    ),
    "a shard without rows gives no pack": (
        "packing/test_pass_end.py::test_shards_without_rows_can_be_counted_and_resumed",
        "nopad.packing.readers.streamed",
        "set_ended = StreamedPacks.read\n"
        "StreamedPacks.read = lambda *a: (p for p in set_ended(*a) if len(p.tokens))",
    ),
    "empty packs are batches": (
        "trainer/data/test_optimizer_steps.py::"
        "test_every_step_of_one_rank_has_packs_with_labels_alone",
        "nopad.trainer.data.loader",
        "right = take_packs\n"
        "take_packs = lambda packs, count, keep_empty: right(packs, count, True)",
    ),
    "a step may be empty on all ranks": (
        "trainer/data/test_optimizer_steps.py::test_a_step_that_is_empty_on_all_ranks_is_skipped",
        "nopad.trainer.data.loader",
        "skip_empty = lambda steps, max_empty: iter(steps)",
    ),
    "several ranks read every empty pack": (
        "trainer/data/test_optimizer_steps.py::"
        "test_several_ranks_end_once_every_shard_gave_an_empty_pack",
        "nopad.trainer.data.loader",
        "right = skip_empty\n"
        "skip_empty = lambda steps, max_empty: right(steps, 10**9)",
    ),
    "a lap reads all that is queued": (
        "packing/ordering/test_mixture.py::"
        "test_a_lap_of_a_small_source_does_not_read_the_queue_of_a_large_one",
        "nopad.packing.ordering.mixture",
        "DRAWN_AT_ONCE = 1 << 16",
    ),
    "a weight of zero is a small one": (
        "packing/ordering/test_mixture.py::test_a_source_is_not_drawn_while_its_weight_is_zero",
        "nopad.packing.ordering.mixture",
        "begin = Mixture.__init__\n"
        "def small(self, *args, **named):\n"
        "    begin(self, *args, **named)\n"
        "    self.fractions = np.maximum(self.fractions, SCALE // 10)\n"
        "Mixture.__init__ = small",
    ),
    "the pool of a shard holds several epochs": (
        "packing/readers/test_streamed.py::"
        "test_documents_of_an_epoch_are_packed_before_those_of_the_next",
        "nopad.packing.readers.shard_reader",
        "begin = ShardReader.__init__\n"
        "def keep_pending(self, *settings):\n"
        "    begin(self, *settings)\n"
        "    if self.end_epoch is None:\n"
        "        self.packer.finish = lambda: iter(())\n"
        "ShardReader.__init__ = keep_pending",
    ),
    "a stream reports what it has read ahead": (
        "packing/readers/test_streamed.py::"
        "test_the_report_of_a_stream_is_of_the_packs_that_were_trained",
        "nopad.packing.readers.shard_reader",
        "right = ShardReader.next_pack\n"
        "def next_pack(self):\n"
        "    pack = right(self)\n"
        "    if pack is not None:\n"
        "        pack.cursor['counts'] = self.packer.counts.as_list()\n"
        "    return pack\n"
        "ShardReader.next_pack = next_pack",
    ),
    "a loader's step ahead is reported as trained": (
        "trainer/data/test_loader.py::"
        "test_the_report_of_a_stream_is_of_whole_steps_whatever_was_read_ahead",
        "nopad.packing.dataset",
        "PackedDataset.count_until = lambda self, state: None",
    ),
    "a resumed stream counts its epoch from 0": (
        "trainer/with_hf/test_epochs.py::test_the_epoch_of_a_stream_goes_on_after_a_resume",
        "nopad.trainer.with_hf.epochs",
        "EpochCallback.on_step_end = lambda *_, **__: None",
    ),
    "a stream that has ended is read again": (
        "trainer/with_hf/test_epochs.py::"
        "test_a_stream_ends_the_training_with_its_epochs",
        "nopad.trainer.monitoring.stream_end",
        "is_stream_end = lambda data, state: False",
    ),
    "max_steps ends a stream in silence": (
        "trainer/with_hf/test_epochs.py::"
        "test_a_stream_that_max_steps_ends_says_so_and_reports_its_packs",
        "nopad.trainer.monitoring.stream_end",
        "print_unread_stream = lambda *_: None",
    ),
    "the banner says nothing of the sources": (
        "trainer/monitoring/test_preflight.py::"
        "test_the_banner_of_a_mixture_is_that_of_its_epoch",
        "nopad.trainer.monitoring.preflight",
        "right = check_run\n"
        "check_run = lambda *a: [line for line in right(*a) if not line.startswith('of an epoch')]",
    ),
    "every source has one key": (
        "packing/encoding/test_token_cache.py", "nopad.packing.encoding.token_cache",
        "entry_key = lambda *_: 'one'",
    ),
    "a pass that is over is continued": (
        "packing/test_pass_end.py", "nopad.packing.dataset",
        "is_finished = lambda *_: False",
    ),
    "the last step of a pass does not end it": (
        "trainer/test_pass_end.py", "nopad.packing.dataset",
        "PackedDataset.end_pass = PackedDataset.state_dict",
    ),
    "a limited validation counts the whole set": (
        "trainer/with_lightning/test_validation.py", "nopad.trainer.data.loader",
        "begin = EvaluationLoader.__init__\n"
        "EvaluationLoader.__init__ = lambda self, data, how=None, limit=None, layout=None: "
        "begin(self, data, how, layout=layout)",
    ),
    "nobody watches the workers": (
        "trainer/data/test_worker_watch.py::"
        "test_whoever_dies_it_is_told_and_nothing_is_left",
        "nopad.trainer.data.worker_watch",
        "from contextlib import nullcontext\n"
        "WorkerWatch.__enter__ = lambda self: self\n"
        "WorkerWatch.reading = lambda self: nullcontext()",
    ),
    "a round ends with its first pack": (
        "trainer/test_rank_trials.py::test_uneven_ranks_stop_after_the_same_step",
        "nopad.packing.ordering.rank_share",
        "RankShare.round_end = lambda self, index, base: index + 1",
    ),
    "the stock loop counts the epochs": (
        "trainer/with_hf/test_epochs.py::"
        "test_evaluations_saves_and_logs_by_epoch_come_after_every_epoch",
        "nopad.trainer.with_hf.epochs", "EpochCallback.ends_within_pass = lambda self: False",
    ),
    "steps are counted once": (
        "trainer/with_hf/test_epochs.py::"
        "test_steps_are_counted_with_the_accumulation_of_the_accelerator",
        "nopad.trainer.with_hf.trainer",
        "right, counts = set_epochs, []\n"
        "def set_epochs(*a):\n"
        "    counts.append(right(*a))\n"
        "    return counts[-1]\n"
        "count_again = lambda *_: counts[0]",
    ),
    "a batch that failed is counted": (
        "trainer/with_lightning/test_failed_steps.py",
        "nopad.trainer.with_lightning.packed_callback",
        "from copy import deepcopy\n"
        "right = PackedCallback.on_load_checkpoint\n"
        "def on_load_checkpoint(self, trainer, module, checkpoint):\n"
        "    loops = deepcopy(checkpoint['loops'])\n"
        "    right(self, trainer, module, checkpoint)\n"
        "    checkpoint['loops'] = loops\n"
        "PackedCallback.on_load_checkpoint = on_load_checkpoint",
    ),
    "a resumed run counts its steps again": (
        "trainer/with_hf/test_epochs_resumed.py", "nopad.trainer.with_hf.trainer",
        "last_step = lambda args, data, _: set_epochs(args, data)",
    ),
    "nobody looks whether losses and weights are finite": (
        "trainer/test_divergence.py", "nopad.trainer.monitoring.finite_check",
        "FiniteCheck.end_step = lambda *_: None\ncheck_weights = lambda *_: None",
    ),
    "the newest checkpoint goes first": (
        "trainer/test_checkpoint_rotation.py::"
        "test_a_clock_set_back_does_not_delete_new_checkpoints",
        "nopad.trainer.checkpoint_manifest",
        "steps_to_delete = lambda steps, newest, limit, keep: sorted(steps)[limit:]",
    ),
    "a signal is heard and forgotten": (
        "trainer/test_graceful_stop.py", "nopad.trainer.graceful_stop",
        "StopRequest.should_stop = lambda self: False",
    ),
    "a signal before the training is lost": (
        "trainer/test_graceful_stop.py::"
        "test_a_signal_to_an_outer_request_is_heard_by_the_inner_one",
        "nopad.trainer.graceful_stop",
        "right = StopRequest.listen\n"
        "def listen(self):\n"
        "    received = self.received\n"
        "    right(self)\n"
        "    self.received = received\n"
        "StopRequest.listen = listen",
    ),
    "the last archive is taken as it is": (
        "trainer/test_checkpoint_manifest.py::"
        "test_the_intact_archive_of_the_highest_step_is_taken",
        "nopad.trainer.checkpoint_manifest",
        "latest_intact_archive = lambda folder: folder / 'last.ckpt'",
    ),
    "nobody locks the folder of a run": (
        "recipes/support/test_run_dir.py::test_a_run_that_is_being_trained_is_not_resumed",
        "nopad.trainer.folder_lock", "lock_folder = lambda folder: None",
    ),
    "the fingerprint is taken at the first state": (
        "packing/state/test_refused_states.py::"
        "test_a_file_that_changes_after_it_was_opened_is_refused_on_resume",
        "nopad.packing.dataset",
        "right = PackedDataset.__init__\n"
        "def late(self, *a, **k):\n"
        "    right(self, *a, **k)\n"
        "    vars(self).pop('fingerprint', None)\n"
        "PackedDataset.__init__ = late",
    ),
    "ranks are not compared": (
        "trainer/data/test_loader.py::"
        "test_ranks_with_other_data_or_settings_are_told_before_the_first_step",
        "nopad.trainer.data.loader", "enumerate = lambda others, start: ()",
    ),
    "something is kept of every pack": (
        "packing/test_bounds.py::"
        "test_a_hundred_thousand_streamed_documents_do_not_grow_the_process",
        "nopad.packing.pack",
        "kept, check = [], Pack.__post_init__\n"
        "Pack.__post_init__ = lambda self: kept.append(b'x' * 200_000 + bytes(1)) or check(self)",
    ),
    "ids of a prompt are not checked": (
        "inference/test_engine.py::test_a_poisonous_request_harms_itself_only",
        "nopad.inference.requests.tokenizer_adapter",
        "right = TokenizerAdapter.encode\n"
        "TokenizerAdapter.encode = lambda self, *a, **k: right("
        "self, *a, **{**k, 'vocab_size': 1 << 62})",
    ),
    "requests that failed are omitted": (
        "inference/test_engine.py::"
        "test_a_poisonous_request_harms_itself_only",
        "nopad.inference.engine",
        "whole = Engine.generate\n"
        "Engine.generate = lambda *a, **k: [c for c in whole(*a, **k) if c.error is None]",
    ),
    "an update of the weights is overlooked": (
        "inference/live_model/test_no_trace.py::"
        "test_cycles_of_update_and_evaluation_equal_a_fresh_engine",
        "nopad.inference.live_model.weights_version",
        "look = WeightsVersion.refresh\n"
        "WeightsVersion.refresh = lambda self: bool(not self.number and look(self))",
    ),
    "nobody waits for the model": (
        "inference/test_threads.py", "nopad.inference.live_model.model_lock",
        "ModelLock.acquire = ModelLock.__enter__ = lambda *_: True\n"
        "ModelLock.release = ModelLock.__exit__ = lambda *_: None",
    ),
    "calls are not counted": (
        "inference/requests/test_draws.py", "nopad.runtime.draw_streams",
        "count = number_call\nnumber_call = lambda kind='': (count(kind)[0], 0)",
    ),
    "a rank draws as the first one": (
        "inference/requests/test_draws.py", "nopad.inference.requests.draws",
        "own_draws = lambda model: Draws(*number_call())",
    ),
    "a context is any model's": (
        "attention/hf/test_model_support.py::"
        "test_models_of_two_threads_do_not_read_each_other_s_context",
        "nopad.attention.hf.forward_context",
        "right = forward_context\n"
        "forward_context = lambda varlen, model=None: right(varlen)",
    ),
    "a rank that shares a model is on its own": (
        "runtime/test_layout.py",
        "nopad.runtime.layout_detection", "replica_mesh = lambda model: None",
    ),
    "a checkpoint forgets the draws": (
        "trainer/data/test_draw_counts.py", "nopad.trainer.data.data_state", "draw_counts = dict",
    ),
    "the mask of a batch is ignored": (
        "inference/requests/test_batch_encoding.py", "nopad.inference.requests.tokenizer_adapter",
        "without_padding = lambda prompt: prompt['input_ids']",
    ),
    "faults of the call hide in completions": (
        "inference/test_engine.py::"
        "test_a_fault_of_the_call_raises_at_once_and_harms_no_active_request",
        "nopad.inference.requests.request_builder", "RequestError = ValueError",
    ),
    "hooks and attributes are overlooked": (
        "inference/live_model/test_unseen_changes.py", "nopad.inference.live_model.weights_version",
        "forward_state = lambda model: []",
    ),
    "steps of fused optimizers are overlooked": (
        "inference/live_model/test_unseen_changes.py::"
        "test_a_request_to_a_busy_engine_uses_no_key_from_before[step_a_fused_optimizer]",
        "nopad.inference.live_model.weights_version",
        "WeightsVersion.note_step = lambda self, optimizer: None",
    ),
    "hooks of all modules are overlooked": (
        "inference/live_model/test_unseen_changes.py::"
        "test_no_cached_key_is_used_after[add_a_hook_of_all_modules]",
        "nopad.inference.live_model.weights_version",
        "_global_forward_hooks = {}",
    ),
    "samples come back to the first column": (
        "inference/live_model/test_unseen_changes.py", "nopad.inference.live_model.weights_version",
        "sample_stride = lambda count, columns: max(1, count // 32)",
    ),
    "scores that are not numbers are kept": (
        "inference/live_model/test_odd_weights.py", "nopad.inference.scheduling.loop",
        "from types import SimpleNamespace\n"
        "right = np\n"
        "np = SimpleNamespace(\n"
        "    isnan=lambda values: right.zeros(len(values), bool), delete=right.delete)",
    ),
    "compiled code is called": (
        "inference/live_model/test_compiled_models.py", "nopad.inference.live_model.borrow",
        "from contextlib import nullcontext\neager_calls = nullcontext",
    ),
    "the generation_config is not read": (
        "inference/requests/test_generation_config.py",
        "nopad.inference.requests.tokenizer_adapter",
        "check_generation_config = lambda *_, **__: None",
    ),
    "every position table is the text's": (
        "inference/test_settings.py::test_the_vision_towers_positions_are_not_the_texts",
        "nopad.inference.settings", "vars = lambda module: {}",
    ),
    "the padding of a captured step is written": (
        "inference/execution/test_step_graphs.py", "nopad.inference.execution.cuda_graphs",
        "right = blank_arrays\n"
        "def blank_arrays(shape, padding_row):\n"
        "    slots = __import__('numpy').zeros(shape.num_tokens, 'int64')\n"
        "    return right(shape, padding_row)._replace(kv_slots=slots)\n"
        "import nopad.inference.execution.graph_shape as shapes\n"
        "shapes.blank_arrays = blank_arrays",
    ),
    "a context loses its first token": (
        "inference/harness/test_harness.py::test_scores_equal_those_of_lm_evals_own_model",
        "nopad.inference.harness.engine_lm",
        "right = DataParallelEngine.score\n"
        "DataParallelEngine.score = lambda self, contexts, *a, **k: right(\n"
        "    self, [ids[1:] or ids for ids in contexts], *a, **k)",
    ),
    "answers of several ranks come back in another order": (
        "trainer/evaluation/test_ranks.py::test_uneven_ranks_never_hang",
        "nopad.inference.data_parallel",
        "right = run_on_all_ranks\n"
        "run_on_all_ranks = "
        "lambda work, shards: right(work, shards)[:: -1 if len(shards) > 1 else 1]",
    ),
    "lines have no limit": (
        "packing/sources/test_hostile_names.py::"
        "test_a_decompression_bomb_is_bounded_by_the_limit_of_a_line",
        "nopad.packing.sources.jsonl",
        "right = compressed_lines\n"
        "def compressed_lines(path, shard, shards, offset, read_line):\n"
        "    whole = lambda file: ((line := file.readline(1 << 40)), len(line))\n"
        "    return right(path, shard, shards, offset, whole)",
    ),
    "packs leave in the order of their lengths": (
        "packing/test_order.py::test_a_place_tells_nothing_of_length_epoch_or_seed",
        "nopad.packing.planning.planner",
        "right = fit_windows\n"
        "def fit_windows(sizes, *settings):\n"
        "    order, offsets, *rest = right(sizes, *settings)\n"
        "    if len(offsets) < 3: return order, offsets, *rest\n"
        "    packs = sorted(np.split(order, offsets[1:-1]), key=lambda pack: sizes[pack].max())\n"
        "    return np.concatenate(packs), np.cumsum([0, *map(len, packs)]), *rest",
    ),
    "packs are made by length alone": (
        "packing/test_order.py::test_documents_that_shared_a_pack_meet_again_by_chance_only",
        "nopad.packing.planning.planner",
        "right = fit_windows\n"
        "def fit_windows(sizes, *settings):\n"
        "    by_size = np.argsort(sizes)\n"
        "    order, offsets, pending, deferrals = right(sizes[by_size], *settings)\n"
        "    return by_size[order], offsets, by_size[pending], deferrals",
    ),
    "groups of one cost keep their place": (
        "packing/test_order.py::test_a_place_tells_nothing_of_length_epoch_or_seed",
        "nopad.packing.planning.balancing",
        "key_of = shuffle_key\n"
        "shuffle_key = lambda name, seed, epoch, block: key_of(name, 0, 0, block)",
    ),
    "ranks that share a model go unnoticed": (
        "runtime/test_layout.py::test_a_data_set_reads_the_packs_of_its_replica",
        "nopad.packing.dataset", "find_layout = lambda *_, **__: None",
    ),
    "ranks of a group are dealt different packs": (
        "trainer/layouts/test_layouts.py::test_four_ranks_train_as_one",
        "nopad.packing.dataset", "PackedDataset.place = lambda *_: None",
    ),
    "first batches are not compared": (
        "trainer/data/test_layout_check.py::test_the_first_step_is_compared_once",
        "nopad.trainer.data.loader", "check_first_step = lambda *_: None",
    ),
    "a shared row has no boundaries": (
        "trainer/layouts/test_layouts.py::test_two_ranks_train_as_one",
        "nopad.trainer.loss.sequence_parallel",
        "right = Varlen\n"
        "def Varlen(bounds, longest, **how):\n"
        "    return right(bounds[[0, -1]], int(bounds[-1]), **how)",
    ),
    "labels are counted on every rank of a group": (
        "trainer/layouts/test_layouts.py::test_two_ranks_train_as_one",
        "nopad.trainer.data.loader",
        "right = PackedLoader.__iter__\n"
        "def __iter__(self):\n"
        "    for batch in right(self):\n"
        "        batch['num_items_in_batch'] *= self.layout.world_size // self.layout.data_size\n"
        "        yield batch\n"
        "PackedLoader.__iter__ = __iter__",
    ),
    "the trainer takes a group for one rank": (
        "trainer/layouts/test_front_end_layouts.py", "nopad.trainer.with_hf.trainer",
        "once = PackedTrainerMixin._get_num_items_in_batch\n"
        "PackedTrainerMixin._get_num_items_in_batch = "
        "lambda self, *a: once(self, *a) // self.layout.sequence.size",
    ),
    "labels are shifted in each part of a row": (
        "trainer/loss/test_sequence_parallel.py", "nopad.trainer.loss.sequence_parallel",
        "split = RowShards.split\n"
        "def late(self, values, fill=0):\n"
        "    part = split(self, values, fill)\n"
        "    part = part.clone()\n"
        "    if fill: part[..., -1] = fill\n"
        "    return part\n"
        "RowShards.split = late",
    ),
    "a group of FSDP has one hook": (
        "trainer/layouts/test_front_end_layouts.py", "nopad.runtime.fsdp_hooks",
        "fsdp_hook_ids = lambda module: {module._get_fsdp_state()._pre_forward_hook_handle.id}",
    ),
    "the start check leaves parameters gathered": (
        "trainer/monitoring/test_preflight.py::"
        "test_the_parameters_of_an_fsdp_model_are_sharded_after_the_check",
        "nopad.trainer.monitoring.preflight", "reshard = lambda model: None",
    ),
    "a layout that was told is forgotten before the first batch": (
        "trainer/layouts/test_model_parallel.py::"
        "test_accelerate_s_loader_counts_its_replicas_before_it_is_read",
        "nopad.trainer.with_accelerate.loader",
        "right = find_layout\n"
        "find_layout = lambda *_, **__: right()",
    ),
    "the sizes of a launch are not read": (
        "recipes/test_launch.py::test_accelerate_reads_what_the_file_says",
        "nopad.runtime.layout_detection",
        "from types import SimpleNamespace\n"
        "os, sys = SimpleNamespace(environ={}), SimpleNamespace(modules={})",
    ),
    "ids are checked in the first step only": (
        "trainer/test_bad_input.py::"
        "test_an_id_outside_the_vocabulary_is_refused_in_every_batch",
        "nopad.trainer.data.model_limits", "ModelLimits.check = lambda *_: None",
    ),
    "options without effect are taken": (
        "trainer/with_hf/test_options.py",
        "nopad.trainer.with_hf.arguments", "check_arguments = lambda *_: None",
    ),
    "a second training begins the data again": (
        "trainer/with_hf/test_eval_sets.py::"
        "test_a_second_training_continues_with_the_next_packs",
        "nopad.trainer.with_hf.trainer",
        "right = PackedTrainerMixin.get_train_dataloader\n"
        "def get_train_dataloader(self):\n"
        "    self.train_dataset.rewind()\n"
        "    return right(self)\n"
        "PackedTrainerMixin.get_train_dataloader = get_train_dataloader",
    ),
    "a small set holds nothing out": (
        "recipes/support/test_holdout.py::"
        "test_a_small_set_has_one_row_held_out_whatever_its_content",
        "nopad.recipes.support.holdout",
        "pick = pick_examples\n"
        "pick_examples = lambda rows, *a: "
        "{k: v for k, v in pick(rows, *a).items() if int(k, 16) % ONE_IN == 0}",
    ),
    "a sequence of any length may join others": (
        "inference/test_sequence_limits.py::test_a_request_beyond_the_limit_fails_alone",
        "nopad.attention.hf.sequence_limits", "sequence_limit = lambda config: None",
    ),
    "frequencies are not frozen": (
        "inference/test_sequence_limits.py::test_generation_leaves_no_trace_in_the_frequencies",
        "nopad.attention.hf.sequence_limits",
        "from contextlib import nullcontext\nfrozen_rotary = nullcontext",
    ),
    "a state is not looked for": (
        "attention/hf/test_model_support.py::"
        "test_a_layer_of_unknown_name_that_mixes_tokens_is_refused",
        "nopad.attention.hf.model_support", "keeps_state = lambda model: False",
    ),
    "the start check runs short rows alone": (
        "trainer/monitoring/test_preflight.py::"
        "test_keys_selected_among_those_of_other_samples_are_seen",
        "nopad.attention.hf.probe_rows", "landmark_lengths = lambda config: []",
    ),
    "the name is accepted for any type": (
        "attention/hf/test_model_support.py::"
        "test_types_that_would_ignore_the_name_are_refused_at_the_first_forward",
        "nopad.attention.hf.mask_patch", "refuse_unsupported = lambda config: None",
    ),
    "a bomb is as large as its file": (
        "packing/sources/test_hostile_names.py::test_a_source_is_small_by_what_comes_out_of_it[gz]",
        "nopad.packing.sources.decompress",
        "decompressed_bytes = lambda paths, sizes: 5 * sum(sizes)",
    ),
    "a turn of weight 0 counts": (
        "packing/encoding/test_chat.py::test_a_turn_that_says_it_does_not_count_is_no_label",
        "nopad.packing.encoding.chat", "TURN_FLAGS = ()",
    ),
    "a position may be anywhere": (
        "packing/state/test_refused_states.py::"
        "test_a_position_beyond_the_run_is_refused_at_once[change1-1]",
        "nopad.packing.readers.planned",
        "MAX_READERS = 1 << 62",
    ),
    "control characters are printed": (
        "cli/test_inspect_data.py::test_escape_sequences_of_the_data_are_shown_not_sent",
        "nopad.cli.terminal",
        "printable = str",
    ),
    "text of the data is HTML": (
        "cli/test_inspect_data.py::test_the_page_is_one_file_that_data_cannot_write_code_into",
        "nopad.cli.data_report.html_page",
        "escape = str",
    ),
    "digits are decoded with spaces between them": (
        "recipes/test_trl_recipes.py::test_an_answer_of_several_digits_is_rewarded",
        "nopad.recipes.grpo",
        "right = character_tokenizer\n"
        "def character_tokenizer():\n"
        "    tokenizer = right()\n"
        "    tokenizer.backend_tokenizer.decoder = None\n"
        "    return tokenizer",
    ),
    "anything is Python": (
        "recipes/support/test_stdlib_corpus.py::"
        "test_a_completion_counts_if_python_can_parse_enough_of_it",
        "nopad.recipes.support.stdlib_corpus",
        "parses = lambda text, reference=None: float(\n"
        "    sum(not character.isspace() for character in text) >= MIN_VISIBLE)",
    ),
    "any node of a settings file is taken": (
        "recipes/support/test_arguments.py::"
        "test_yaml_that_grows_or_contradicts_itself_is_refused_at_once",
        "nopad.recipes.support.arguments",
        "import yaml\n"
        "read_yaml = lambda path: "
        "{key.value: [] for key, _ in yaml.compose(path.read_text(), yaml.SafeLoader).value}",
    ),
    "missing weights are random": (
        "cli/test_load_pretrained.py::test_weights_that_are_missing_are_not_filled_at_random",
        "nopad.inference.pretrained.loading",
        "from transformers import AutoModelForCausalLM as auto\n"
        "load_weights = lambda path, **k: auto.from_pretrained(path, trust_remote_code=False, **k)",
    ),
    "a settings file is read with the types of YAML": (
        "recipes/support/test_arguments.py::"
        "test_values_in_the_yaml_are_the_text_that_is_written",
        "nopad.recipes.support.arguments",
        "import yaml\n"
        "def read_yaml(path):\n"
        "    values = yaml.safe_load(path.read_text()).items()\n"
        "    return {k: [str(n) for n in (v if isinstance(v, list) else [v])] for k, v in values}",
    ),
    "any number may clip": (
        "recipes/support/test_arguments.py::"
        "test_a_number_that_would_train_wrongly_is_refused",
        "nopad.cli.options",
        "number_above_0 = number_from_0 = float",
    ),
    "a failed request is not repeated": (
        "packing/sources/test_remote.py::"
        "test_a_server_that_fails_at_times_gives_the_packs_of_the_disk",
        "nopad.packing.sources.remote.filesystem",
        "ATTEMPTS = 1",
    ),
    "a refused request is repeated": (
        "packing/sources/test_remote.py::test_a_refused_request_is_not_repeated",
        "nopad.packing.sources.remote.filesystem",
        "_http_status = lambda error: None",
    ),
    "shards behind a URL are taken to be whole": (
        "packing/encoding/test_tokenization.py::"
        "test_a_truncated_shard_behind_a_url_is_named_and_written_again",
        "nopad.packing.sources.remote.remote_folder",
        "RemoteFolder.file = lambda self, name, size: RemoteFile(f'{self.url}/{name}', size)",
    ),
    "a lost connection is a damaged row": (
        "packing/sources/test_remote.py::"
        "test_a_server_that_is_gone_is_never_a_skipped_row",
        "nopad.packing.sources.parquet",
        "class RemoteReadError(Exception): pass",
    ),
    "a rank saves its own shards only": (
        "trainer/data/test_data_state.py", "nopad.trainer.data.data_state",
        "gather_data_state = lambda loader: {**loader.state(), DRAWS: draw_counts()}",
    ),
    "restarted workers start a new run": (
        "recipes/support/test_arguments.py::"
        "test_workers_that_were_restarted_resume_the_run_in_their_folder",
        "nopad.recipes.support.arguments",
        "resume_if_restarted = lambda explicit: None",
    ),
    "every rank agrees with itself": (
        "cli/test_doctor_distributed.py", "nopad.cli.doctor_distributed",
        "right = Row\n"
        "Row = lambda name, faults, *rest, **named: right(name, {}, *rest, **named)",
    ),
    "models stay in eval mode": (
        "trainer/test_train_mode.py", "nopad.trainer.train_mode",
        "ensure_train_mode = lambda model: None",
    ),
    "the doctor knows of no repair": (
        "cli/test_doctor.py::test_what_is_said_of_our_trainers_is_what_their_check_does",
        "nopad.cli.doctor_isolation",
        "right = check_packed\n"
        "check_packed = lambda *a, repair=False, **k: right(*a, **k)",
    ),
    "an argument is not explained": (
        "test_reference.py::test_every_argument_is_explained", "nopad.packing.dataset",
        "PackedDataset.__doc__ = 'Packs of a source.'",
    ),
    "an example of the documentation does not run": (
        "test_documentation.py::test_the_python_of_a_page_runs[packing.md]",
        "nopad.collators.packed", "del PackedCollator.__call__",
    ),
    "prompts are logged": (
        "inference/test_engine.py::test_logs_hold_no_prompt_and_no_text",
        "nopad.inference.engine",
        "import logging\nquiet = Engine.generate\n"
        "Engine.generate = lambda self, prompts, *a, **k: "
        "logging.getLogger(__name__).error('%s', prompts) or quiet(self, prompts, *a, **k)",
    ),
    "no rounding is allowed": (
        "trainer/monitoring/test_packing_difference.py::test_experts_pass_in_any_precision",
        "nopad.trainer.monitoring.packing_difference",
        "from contextlib import nullcontext\n"
        "embeddings_replaced = lambda *_: nullcontext()",
    ),
    "no gradient is looked for": (
        "trainer/monitoring/test_packing_difference.py::test_a_weak_leak_is_seen",
        "nopad.trainer.monitoring.packing_difference", "leaked_gradient = lambda *a: 0.0",
    ),
    "packed is not compared with alone": (
        "trainer/monitoring/test_packing_difference.py::test_every_fault_is_seen",
        "nopad.trainer.monitoring.packing_difference", "measure_difference = lambda *a, **k: 0.0",
    ),
    "the start check has no long row": (
        "trainer/monitoring/test_packing_difference.py::test_every_fault_is_seen",
        "nopad.attention.hf.probe_rows",
        "right = probe_rows\n"
        "probe_rows = lambda *a: {n: r if n else r[1:] for n, r in right(*a).items()}",
    ),
    "zeros stay zeros": (
        "trainer/monitoring/test_packing_difference.py::"
        "test_a_leak_behind_weights_that_are_zero_is_seen",
        "nopad.attention.hf.leak_check", "Tensor.normal_ = lambda self, *a, **k: self",
    ),
    "a tiny model has the layers of the default config": (
        "cli/test_doctor.py::"
        "test_a_type_is_examined_with_every_kind_of_layer_that_it_can_have[lfm2]",
        "nopad.cli.tiny_model", "ALLOWED_LAYER_TYPES = ()",
    ),
    "nobody asks which layers are lacking": (
        "cli/test_doctor.py::test_kinds_of_layers_that_the_tiny_model_of_a_config_lacks_are_told",
        "nopad.cli.tiny_model", "layer_kinds = lambda model: set()",
    ),
    "a window that is not passed is none": (
        "attention/hf/test_model_zoo.py::"
        "test_packed_is_one_by_one_is_paged_except_where_listed[qwen2_moe]",
        "nopad.attention.hf.interface",
        "right = attention\n"
        "attention = lambda *a, **k: right(*a, **{'sliding_window': None, **k})",
    ),
    "a metric is averaged over the examples it did not fail on": (
        "trainer/evaluation/test_generation_eval.py::"
        "test_a_metric_that_raises_on_some_examples_has_no_mean",
        "nopad.trainer.evaluation.completion_scores",
        "right = score_completions\n"
        "def forgive(metric):\n"
        "    def value(*a):\n"
        "        try:\n"
        "            return metric(*a)\n"
        "        except Exception:\n"
        "            return 1.0\n"
        "    return value\n"
        "score_completions = lambda metrics, *rest: right(\n"
        "    {name: forgive(metric) for name, metric in metrics.items()}, *rest)",
    ),
    "errors of metrics are never raised": (
        "trainer/evaluation/test_generation_eval.py::"
        "test_a_metric_that_returns_no_number_is_told_beside_other_errors",
        "nopad.trainer.evaluation.generation_eval",
        "from dataclasses import replace\n"
        "right = score_completions\n"
        "def score_completions(*a):\n"
        "    scores = right(*a)\n"
        "    errors = join_errors(scores.request_errors, scores.metric_errors)\n"
        "    return replace(scores, request_errors=errors, metric_errors=None)",
    ),
    "the first sample alone is scored": (
        "trainer/evaluation/test_generation_eval.py::test_all_samples_of_a_prompt_are_scored",
        "nopad.trainer.evaluation.generation_eval",
        "right = score_completions\n"
        "def score_completions(metrics, indices, examples, completions):\n"
        "    for completion in completions:\n"
        "        completion.others = ()\n"
        "    return right(metrics, indices, examples, completions)",
    ),
    "standard input keeps its carriage returns": (
        "cli/test_generate.py::test_lines_of_standard_input_end_as_those_of_a_file",
        "nopad.cli.prompt_file",
        "import types\n"
        "real = sys\n"
        "class Untranslated(types.SimpleNamespace):\n"
        "    stdin = property(lambda self: (line for line in real.stdin))\n"
        "sys = Untranslated(maxsize=real.maxsize)",
    ),
    "a misspelled parameter is another field": (
        "cli/test_generate.py::test_a_misspelled_parameter_is_refused_with_the_right_name",
        "nopad.cli.prompt_file",
        "from types import SimpleNamespace\n"
        "difflib = SimpleNamespace(get_close_matches=lambda *_: [])",
    ),
    "padding is that of uncut samples": (
        "cli/test_inspect_data.py::test_padded_fill_is_that_of_the_samples_as_they_are_cut",
        "nopad.cli.data_report.figures",
        "right = padded_fill\n"
        "padded_fill = lambda lengths, budget, *_: right(lengths, budget)",
    ),
    "Transformers loads the adapters": (
        "cli/test_load_pretrained.py::"
        "test_the_folder_of_an_adapter_is_its_model_with_the_adapter[kind1]",
        "nopad.inference.pretrained.loading",
        "ask = is_adapter\n"
        "right = load_weights\n"
        "def stock(path, *args, **options):\n"
        "    global is_adapter\n"
        "    is_adapter = lambda name: False\n"
        "    try:\n"
        "        return right(path, *args, **options)\n"
        "    finally:\n"
        "        is_adapter = ask\n"
        "load_weights = stock",
    ),
    "every loader counts from its own start": (
        "trainer/with_accelerate/test_loader.py::"
        "test_a_validation_inside_a_step_moves_no_optimizer_step",
        "nopad.trainer.with_accelerate.loader",
        "right = PackedAccelerateLoader.__iter__\n"
        "def __iter__(self):\n"
        "    step = 0\n"
        "    for batch in right(self):\n"
        "        self.accelerator.step = step\n"
        "        yield batch\n"
        "        step = self.accelerator.step\n"
        "    self.accelerator.step = step\n"
        "PackedAccelerateLoader.__iter__ = __iter__",
    ),
    "gradients of a step that was left stay": (
        "trainer/with_accelerate/test_loader.py::"
        "test_a_step_that_a_loop_has_left_is_trained_again",
        "nopad.trainer.with_accelerate.loader",
        "right = PackedAccelerateLoader.__iter__\n"
        "def __iter__(self):\n"
        "    vars(self.accelerator).pop('nopad_left_step', None)\n"
        "    return right(self)\n"
        "PackedAccelerateLoader.__iter__ = __iter__",
    ),
    "manual steps are not noticed": (
        "trainer/with_lightning/test_own_steps.py", "nopad.trainer.with_lightning.packed_callback",
        "ManualSteps.check = lambda *_: None",
    ),
    "every pack of a validation weighs the same": (
        "trainer/with_accelerate/test_loader.py::"
        "test_a_validation_gives_the_token_mean_whatever_the_accumulation",
        "nopad.trainer.data.loader",
        "right = EvaluationLoader.__iter__\n"
        "def __iter__(self):\n"
        "    for batch in right(self):\n"
        "        labels = int((batch['labels'][..., 1:] != -100).sum())\n"
        "        yield {**batch, 'num_items_in_batch': max(1, labels)}\n"
        "EvaluationLoader.__iter__ = __iter__",
    ),
    "only the first model is looked at": (
        "trainer/with_lightning/test_two_models.py", "nopad.trainer.with_lightning.hooks",
        "trained_lms = lambda module: [unwrap_peft(pretrained_models(module)[0])]",
    ),
    "a teacher is not looked at": (
        "trainer/with_lightning/test_two_models.py",
        "nopad.trainer.with_lightning.packed_callback",
        "from types import SimpleNamespace\n"
        "check_when_packed = lambda *_: SimpleNamespace(remove=lambda: None)",
    ),
    "nobody notices a loss of one's own": (
        "trainer/with_lightning/test_own_steps.py", "nopad.trainer.with_lightning.packed_callback",
        "right = print_banner\n"
        "print_banner = lambda lines: right([line for line in lines if OWN_LOSS not in line])",
    ),
    "masks are repaired for labels only": (
        "trainer/loss/test_stock_attention.py::"
        "test_a_loss_of_ones_own_from_repaired_logits_is_that_of_the_model",
        "nopad.trainer.loss.attached_loss",
        "right, run, has_labels = document_contexts, AttachedLoss.run, False\n"
        "document_contexts = lambda *row: right(*row) if has_labels else nullcontext()\n"
        "def run_with_labels(self, *a):\n"
        "    global has_labels\n"
        "    has_labels = True\n"
        "    try:\n"
        "        return run(self, *a)\n"
        "    finally:\n"
        "        has_labels = False\n"
        "AttachedLoss.run = run_with_labels",
    ),
    "the packs of a step are forgotten": (
        "trainer/test_step_size.py", "nopad.trainer.data.data_state",
        "load_merged_state = lambda loader, state: loader.load_state(restore_draws(state))",
    ),
    "a thread keeps the model until its call is done": (
        "inference/test_threads.py::test_calls_of_several_threads_share_steps",
        "nopad.inference.session", "ModelSession.sharing_key = lambda self: None",
    ),
    "calls of any kind share steps": (
        "inference/test_threads.py::test_a_call_that_computes_otherwise_does_not_share_steps",
        "nopad.inference.session", "ModelSession.sharing_key = lambda self: 'the same'",
    ),
    "a fault ends the calls of other threads": (
        "inference/test_threads.py::"
        "test_a_fault_of_one_call_harms_no_call_that_shares_its_steps",
        "nopad.inference.request_runner",
        "calls, begin, end = [], Call.start, RequestRunner.fail_all\n"
        "def start(self, *a):\n"
        "    begin(self, *a)\n"
        "    calls.append(self)\n"
        "def fail_all(self, error):\n"
        "    running = [call for call in calls if call.is_started and not call.is_over]\n"
        "    end(self, error)\n"
        "    for call in running:\n"
        "        call.collect()\n"
        "        call.is_started = call.is_over = True\n"
        "Call.start, RequestRunner.fail_all = start, fail_all",
    ),
    "the last thread gets the model first": (
        "inference/live_model/test_model_lock.py", "nopad.inference.live_model.model_lock",
        "deque = type('Stack', (deque,), {'popleft': deque.pop})",
    ),
    "a request to a busy engine looks at counters alone": (
        "inference/live_model/test_unseen_changes.py",
        "nopad.inference.live_model.weights_version",
        "WeightsVersion.forwards_unchanged = lambda self: True",
    ),
    "a stop string is looked for after the prompt": (
        "inference/harness/test_harness.py::"
        "test_answers_equal_hf_where_the_first_space_of_a_text_is_dropped",
        "nopad.inference.harness.engine_lm",
        "right = DataParallelEngine.generate\n"
        "def generate(self, *a, **k):\n"
        "    completions = right(self, *a, **k)\n"
        "    for completion in completions:\n"
        "        if completion.finish_reason == 'stop':\n"
        "            completion.finish_reason = 'length'\n"
        "    return completions\n"
        "DataParallelEngine.generate = generate",
    ),
    "add_bos_token is ignored": (
        "inference/harness/test_harness.py::"
        "test_answers_equal_hf_where_the_first_space_of_a_text_is_dropped",
        "nopad.inference.harness.engine_lm",
        "begin = EngineLM.__init__\n"
        "EngineLM.__init__ = lambda self, *args, add_bos_token=None, **named: "
        "begin(self, *args, **named)",
    ),
    "every batch adds its auxiliary loss": (
        "trainer/loss/test_auxiliary_loss.py", "nopad.trainer.loss.auxiliary_loss",
        "right = AuxiliaryLoss.begin\n"
        "AuxiliaryLoss.begin = lambda self, kwargs, targets, weights, divisor, shards: right(\n"
        "    self, kwargs, targets, torch.ones(1), 1, shards)",
    ),
    "padding is balanced over the experts": (
        "trainer/loss/test_auxiliary_loss.py::test_padding_does_not_count",
        "nopad.trainer.loss.auxiliary_loss",
        "right = AuxiliaryLoss.begin\n"
        "AuxiliaryLoss.begin = lambda self, kwargs, *rest: right(\n"
        "    self, {**kwargs, 'cu_seq_lens_q': None}, *rest)",
    ),
    "a part of a row has an auxiliary loss of its own": (
        "trainer/layouts/test_layouts.py::"
        "test_the_auxiliary_loss_is_that_of_one_rank_in_every_layout",
        "nopad.trainer.loss.auxiliary_loss",
        "right = AuxiliaryLoss.begin\n"
        "AuxiliaryLoss.begin = lambda self, kwargs, targets, weights, divisor, shards: right(\n"
        "    self, {**kwargs, 'cu_seq_lens_q': None}, targets, weights, divisor, None)",
    ),
    "compiled layers return no router logits": (
        "trainer/loss/test_auxiliary_loss.py::test_compiled_layers_have_the_same_from_one_graph",
        "nopad.attention.hf.router_logits",
        "right = returning_router_logits\n"
        "returning_router_logits = lambda *a, **k: (right(*a, **k)[0], [])",
    ),
    "the head is taken as it is": (
        "trainer/loss/test_head_bypass.py", "nopad.trainer.loss.head_bypass",
        "has_plain_head = lambda model, head: isinstance(head, nn.Linear)",
    ),
    "the bias is added to scaled logits": (
        "trainer/loss/test_head_bypass.py::test_the_bias_of_a_head_is_scaled_with_the_logits",
        "nopad.trainer.loss.head_bypass",
        "right = split_scale\nsplit_scale = lambda hidden, bias: (right(hidden, bias)[0], bias)",
    ),
    "logits that were not computed are None": (
        "trainer/loss/test_head_bypass.py::"
        "test_who_uses_logits_that_were_not_computed_is_told_how_to_get_them",
        "nopad.trainer.loss.head_bypass", "NoLogits = lambda: None",
    ),
    "a count that is dropped is lost": (
        "trainer/with_hf/test_trainer.py::"
        "test_the_gradient_of_a_step_is_that_of_its_samples_one_by_one",
        "nopad.trainer.with_hf.trainer",
        "right = PackedTrainerMixin.get_batch_samples\n"
        "def get_batch_samples(self, *a, **k):\n"
        "    batches, items = right(self, *a, **k)\n"
        "    kept = [{n: v for n, v in b.items() if n != 'num_items_in_batch'} for b in batches]\n"
        "    return kept, items\n"
        "PackedTrainerMixin.get_batch_samples = get_batch_samples",
    ),
    "a loss below the mixin is passed over": (
        "trainer/with_hf/test_own_loss.py::"
        "test_a_loss_below_the_mixin_is_refused_and_called_above_it",
        "nopad.trainer.with_hf.trainer", "check_compute_loss = lambda trainer: None",
    ),
    "evaluations do not tell the count": (
        "trainer/with_hf/test_own_loss.py::"
        "test_a_loss_function_gets_the_count_in_evaluations_too",
        "nopad.trainer.with_hf.trainer",
        "count = PackedTrainerMixin._get_num_items_in_batch\n"
        "PackedTrainerMixin._get_num_items_in_batch = lambda self, batches, device: "
        "None if 'num_items_in_batch' in batches[0] else count(self, batches, device)",
    ),
    "an epoch that was stopped goes on": (
        "trainer/with_hf/test_epochs.py::"
        "test_an_epoch_that_a_callback_stops_is_left_and_the_next_one_follows",
        "nopad.trainer.with_hf.epochs", "del EpochCallback.on_epoch_end",
    ),
    "the means of packs are averaged": (
        "trainer/with_hf/test_eval_sets.py::"
        "test_trl_s_metrics_of_an_evaluation_are_means_over_tokens",
        "nopad.trainer.with_hf.trainer",
        "right = PackedTrainerMixin.compute_loss\n"
        "def compute_loss(self, *a, **k):\n"
        "    names = 'mean_token_accuracy', 'entropy'\n"
        "    metrics = trl_log(self)['train' if self.model.training else 'eval']\n"
        "    before = {name: metrics.pop(name, []) for name in names}\n"
        "    loss = right(self, *a, **k)\n"
        "    for name in names:\n"
        "        metrics[name] = before[name] + metrics.get(name, [])\n"
        "    return loss\n"
        "PackedTrainerMixin.compute_loss = compute_loss",
    ),
    "the last step alone is measured": (
        "trainer/with_hf/test_eval_sets.py::"
        "test_trl_s_metrics_of_a_step_are_means_over_its_tokens",
        "nopad.trainer.with_hf.epochs", "EpochCallback.ends_epoch = lambda self: False",
    ),
    "an empty pack has a token": (
        "trainer/with_hf/test_options.py::test_tokens_seen_are_those_of_the_packs",
        "nopad.trainer.with_hf.trainer", "del PackedTrainerMixin._track_num_input_tokens",
    ),
    "the tokens of one rank stand for those of all": (
        "trainer/with_hf/test_trainer.py::test_tokens_seen_are_the_sum_over_ranks",
        "nopad.trainer.monitoring.throughput",
        "ThroughputMeter.totals = lambda self: {\n"
        "    name: self.read()[name] for name in ('tokens_seen', 'samples_seen')}",
    ),
    "the last log has no totals": (
        "trainer/with_hf/test_options.py::"
        "test_the_last_log_has_the_totals_and_every_rate_counts_samples",
        "nopad.trainer.monitoring.throughput",
        "ThroughputMeter.totals = lambda self: {'samples_seen': self.seen['samples']}",
    ),
    "the rate of an evaluation counts packs": (
        "trainer/with_hf/test_options.py::"
        "test_the_last_log_has_the_totals_and_every_rate_counts_samples",
        "nopad.trainer.with_hf.evaluation",
        "TrainerEvaluationLoader.samples = property(\n"
        "    lambda self: self.packs, lambda self, value: None)",
    ),
    "a training begins with a new optimizer": (
        "trainer/with_hf/test_trainer.py::"
        "test_a_checkpoint_of_the_stock_trainer_continues_with_its_optimizer",
        "nopad.trainer.with_hf.trainer",
        "right = PackedTrainerMixin.train\n"
        "def train(self, *a, **k):\n"
        "    self.optimizer = None\n"
        "    return right(self, *a, **k)\n"
        "PackedTrainerMixin.train = train",
    ),
    "tools that no template uses are ignored": (
        "inference/endpoint/test_server.py::"
        "test_tools_that_the_chat_template_does_not_use_are_refused",
        "nopad.inference.endpoint.server",
        "from dataclasses import replace\n"
        "right = parse_call\n"
        "parse_call = lambda *a: replace(right(*a), tools=None)",
    ),
    "any model is a causal LM": (
        "trainer/loss/test_attached_loss.py::test_models_that_are_no_causal_lm_are_refused",
        "nopad.trainer.loss.heads", "not_causal_lm_reason = lambda model: None",
    ),
    "labels of documents are dropped": (
        "collators/test_packed.py::test_labels_of_documents_reach_the_batch_and_are_not_padded",
        "nopad.collators.features",
        "right = as_samples\n"
        "as_samples = lambda rows: right(\n"
        "    [{name: value for name, value in row.items() if name != 'label'} for row in rows])",
    ),
    "any collator is taken": (
        "trainer/with_hf/test_trainer.py::"
        "test_a_collator_that_is_not_for_packs_is_refused_at_once",
        "nopad.trainer.with_hf.trainer", "check_collator = lambda collator: None",
    ),
    "layers are counted before a model is refused": (
        "attention/hf/test_model_support.py::"
        "test_a_model_has_the_same_reason_after_another_forward_was_bound_to_it",
        "nopad.attention.hf.model_support", "check_supported = lambda *_, **__: None",
    ),
    "the packer chooses from the whole schedule": (
        "packing/ordering/test_mixture.py::test_the_trained_packs_follow_changing_weights",
        "nopad.packing.ordering.mixture", "schedule_intervals = lambda *_: []",
    ),
    "the shards of a stream are not flushed": (
        "packing/ordering/test_mixture.py::test_each_shard_of_a_stream_follows_changing_weights",
        "nopad.packing.planning.packer", "Packer.flush = lambda self: iter(())",
    ),
    "packs of an interval come by chance": (
        "packing/planning/test_share_order.py",
        "nopad.packing.planning.share_order", "order_by_shares = lambda plan, *_, **__: plan",
    ),
    "an epoch forgets what the one before owes a source": (
        "packing/ordering/test_mixture.py::"
        "test_shares_do_not_drift_over_the_epochs_of_small_sources",
        "nopad.packing.ordering.mixture",
        "right = Mixture.restart\n"
        "def restart(self):\n"
        "    right(self)\n"
        "    self.credits = self.fractions[0].copy()\n"
        "Mixture.restart = restart",
    ),
    "truncated tokens have a share": (
        "packing/ordering/test_mixture.py::"
        "test_tokens_that_are_truncated_or_dropped_have_no_share",
        "nopad.packing.readers.planned", "kept_lengths = lambda lengths, packer: lengths",
    ),
    "shares are those of the whole run": (
        "trainer/monitoring/test_throughput.py::test_tokens_and_shares_are_told_by_source",
        "nopad.trainer.monitoring.throughput",
        "right = ThroughputMeter.read\n"
        "def read(self):\n"
        "    rates = right(self)\n"
        "    shares = [name for name in rates if name.startswith('share_')]\n"
        "    tokens = {name: rates[name.replace('share_', 'tokens_')] for name in shares}\n"
        "    return rates | {name: tokens[name] / rates['tokens_seen'] for name in shares}\n"
        "ThroughputMeter.read = read",
    ),
    "encoding is silent": (
        "packing/test_preparation_progress.py::"
        "test_encoding_says_how_many_tokens_are_done_and_what_is_left",
        "nopad.packing.preparation_progress", "TokenProgress.update = lambda self, *_: None",
    ),
    "every worker announces the compilation": (
        "packing/test_preparation_progress.py::"
        "test_one_of_several_workers_announces_the_compilation",
        "nopad.packing.preparation_progress",
        "say = lambda message: print(message, file=sys.stderr)",
    ),
    "compilation is silent": (
        "packing/test_preparation_progress.py::"
        "test_the_compilation_of_the_packer_is_announced_once",
        "nopad.packing.preparation_progress",
        "from contextlib import nullcontext\n"
        "announce_compilation = lambda *_: nullcontext()",
    ),
    "every rank compiles the packer": (
        "packing/test_compiler_process.py::test_ranks_and_workers_start_one_process",
        "nopad.packing.compiler_process",
        "from contextlib import nullcontext\n"
        "cache_lock = lambda folder: nullcontext(0)",
    ),
    "the planner does not wait for the process that compiles it": (
        "packing/test_compiler_process.py::"
        "test_the_planner_waits_for_the_process_and_says_so_once",
        "nopad.packing.preparation_progress", "is_being_compiled = lambda function: False",
    ),
    "a graph is traced while inductor is imported": (
        "trainer/layers/test_inductor_startup.py::"
        "test_the_first_compiled_call_waits_until_inductor_is_loaded",
        "nopad.trainer.layers.compile_layers", "wait_for_inductor = lambda: None",
    ),
    "any id is in an unknown vocabulary": (
        "packing/encoding/test_hostile_documents.py::"
        "test_an_id_beyond_any_vocabulary_is_named_where_none_is_known",
        "nopad.packing.token_ids", "MAX_TOKEN_ID = 2**63 - 2",
    ),
    "every answer is trained": (
        "packing/encoding/test_chat.py::"
        "test_of_chats_with_tools_and_flags_exactly_the_trained_answers_count",
        "nopad.packing.encoding.chat", "TURN_FLAGS = ()",
    ),
    "reentrant checkpoints are differentiated": (
        "trainer/monitoring/test_packing_difference.py::"
        "test_gradient_checkpointing_is_part_of_the_check",
        "nopad.attention.hf.leak_check", "partial = lambda function, **_: function",
    ),
    "every token of a row is probed": (
        "trainer/monitoring/test_packing_difference.py::"
        "test_a_long_row_of_short_samples_has_few_logits_and_shows_a_leak",
        "nopad.attention.hf.leak_check",
        "probe_positions = lambda lengths: (torch.arange(sum(lengths)), list(lengths))",
    ),
    "an auxiliary loss may have no gradient": (
        "trainer/loss/test_auxiliary_loss.py::"
        "test_checkpoints_that_would_lose_its_gradient_are_refused",
        "nopad.trainer.loss.auxiliary_loss",
        "AuxiliaryLoss.begin = torch.no_grad()(AuxiliaryLoss.begin)",
    ),
    "a trainer replaces any loss": (
        "trainer/loss/test_attached_loss.py::"
        "test_a_trainer_does_not_replace_a_loss_with_other_options",
        "nopad.trainer.loss.attached_loss",
        "attach_trainer_loss = lambda m, o, g: attach_loss(m, **o, sequence_group=g)",
    ),
    "experts of a checkpoint are passed over": (
        "trainer/with_hf/test_saved_weights.py",
        "nopad.trainer.with_hf.trainer", "load_converted = lambda *arguments: None",
    ),
    "modules are those of the first request": (
        "inference/live_model/test_changed_models.py::"
        "test_a_change_of_modules_is_refused_while_requests_run",
        "nopad.inference.session",
        "right, first = build_key, []\n"
        "def build_key(modules, dtype):\n"
        "    first[:] = first or modules\n"
        "    return right(first, dtype)",
    ),
    "a call that has begun waits for the others": (
        "inference/test_threads.py::"
        "test_modules_that_come_while_calls_run_hold_up_none_of_them",
        "nopad.inference.request_runner",
        "Call.thread = property(lambda self: None, lambda self, thread: None)",
    ),
    "a call that is aborted keeps its events": (
        "inference/test_late_prompts.py::test_a_fault_found_as_other_requests_end_is_told",
        "nopad.inference.request_runner",
        "right = Call.collect\n"
        "class EventQueue(EventQueue):\n"
        "    is_read = False\n"
        "    def clear(self):\n"
        "        if self.is_read:\n"
        "            super().clear()\n"
        "def collect(self):\n"
        "    self.events.is_read = True\n"
        "    try:\n"
        "        return right(self)\n"
        "    finally:\n"
        "        self.events.is_read = False\n"
        "Call.collect = collect",
    ),
    "fractions change linearly": (
        "packing/ordering/test_mixture.py::"
        "test_weights_change_linearly_also_where_their_sum_changes",
        "nopad.packing.ordering.mixture", "CURVE_KNOTS = 2",
    ),
    "padding has a share": (
        "packing/ordering/test_mixture.py::"
        "test_padding_between_samples_has_no_share_in_a_stream",
        "nopad.packing.planning.packer",
        "Packer.last_lengths = property(\n"
        "    lambda self: -(-vars(self)['last_lengths'] // 8) * 8,\n"
        "    lambda self, lengths: vars(self).update(last_lengths=lengths))",
    ),
    "progress is reported while the model is locked": (
        "inference/test_threads.py::test_progress_may_wait_for_the_call_of_another_thread",
        "nopad.inference.request_runner",
        "right = Call.collect\n"
        "def collect(self):\n"
        "    is_new = right(self)\n"
        "    if self.thread == get_ident():\n"
        "        self.report()\n"
        "    return is_new\n"
        "Call.collect = collect",
    ),
    "a driver whose call is over remains the driver": (
        "inference/test_threads.py::"
        "test_a_call_that_another_thread_has_finished_holds_up_no_third_one",
        "nopad.inference.request_runner",
        "right = RequestRunner._drive\n"
        "def _drive(self, call):\n"
        "    before = self._driver\n"
        "    right(self, call)\n"
        "    self._driver = before or self._driver\n"
        "RequestRunner._drive = _drive",
    ),
    "a call that is waited for stays behind another autocast": (
        "inference/test_threads.py::"
        "test_progress_may_wait_for_a_call_while_another_autocast_waits",
        "nopad.inference.request_runner",
        "Call.is_reporting = property(lambda self: False, lambda self, value: None)",
    ),
    "only the first step is searched for labels": (
        "trainer/monitoring/test_preflight.py::"
        "test_data_is_refused_if_none_of_the_first_steps_has_a_label",
        "nopad.trainer.data.loader", "MAX_UNLABELLED_STEPS = 1",
    ),
    "all documents are examined together": (
        "trainer/monitoring/test_packing_difference.py::test_any_two_documents_are_told_apart",
        "nopad.attention.hf.leak_check", "comb = lambda sets, members: 99",
    ),
    "later calls join while one waits": (
        "inference/test_threads.py::"
        "test_a_call_that_computes_otherwise_runs_before_later_ones",
        "nopad.inference.request_runner",
        "class ModelLock(ModelLock):\n"
        "    depth = property(lambda self: 0, lambda self, value: None)",
    ),
    "the stream of a thread does not count": (
        "inference/test_threads.py::test_calls_on_two_cuda_streams_do_not_share_steps",
        "nopad.inference.session",
        "right = ModelSession.sharing_key\n"
        "ModelSession.sharing_key = lambda self: (right(self) or (None,))[:2]",
    ),
    "memory is freed between the steps of a call": (
        "inference/test_threads.py::test_memory_is_kept_between_the_steps_of_shared_calls",
        "nopad.inference.session",
        "right = ModelSession.release_if_idle\n"
        "def release_if_idle(self):\n"
        "    num_calls, self.num_calls = self.num_calls, 0\n"
        "    right(self)\n"
        "    self.num_calls = num_calls\n"
        "ModelSession.release_if_idle = release_if_idle",
    ),
    "a thread that is interrupted keeps its place": (
        "inference/live_model/test_model_lock.py", "nopad.inference.live_model.model_lock",
        "deque = type('Kept', (deque,), {'remove': lambda *_: None})",
    ),
    "a classifier takes packs": (
        "attention/hf/test_interface.py::test_packs_in_a_sequence_classifier_are_refused",
        "nopad.attention.hf.call_check",
        "from types import SimpleNamespace\n"
        "sys = SimpleNamespace(_getframe=lambda depth: None)",
    ),
    "special tokens have no names": (
        "inference/harness/test_harness.py::"
        "test_answers_equal_hf_where_a_stop_string_names_special_tokens",
        "nopad.inference.harness.engine_lm",
        "begin = EngineLM.__init__\n"
        "class Nameless:\n"
        "    def __init__(self, tokenizer):\n"
        "        self.real = tokenizer\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(self.real, name)\n"
        "    def decode(self, ids, **options):\n"
        "        hides = {'skip_special_tokens': True} if len(ids) > 1 else {}\n"
        "        return self.real.decode(ids, **options | hides)\n"
        "def __init__(self, *args, **named):\n"
        "    begin(self, *args, **named)\n"
        "    self.tokenizer = Nameless(self.tokenizer)\n"
        "EngineLM.__init__ = __init__",
    ),
    "the last packs of a stream come by chance": (
        "packing/ordering/test_mixture.py::test_the_last_packs_of_a_stream_follow_changing_weights",
        "nopad.packing.readers.shard_reader", "has_schedule = lambda weights: False",
    ),
    "products of experts have any shape": (
        "inference/test_batch_invariant.py::"
        "test_layers_that_are_no_linear_give_the_same_bits",
        "nopad.inference.batch_invariant", "GROUPED_PRODUCTS.clear()",
    ),
    "other products are taken as they are": (
        "inference/test_batch_invariant.py::"
        "test_products_that_depend_on_the_batch_are_refused",
        "nopad.inference.batch_invariant", "UNSUPPORTED_PRODUCTS.clear()",
    ),
    "a call that joins looks at counters alone": (
        "inference/test_threads.py::test_a_call_that_joins_notices_what_changed_before_it",
        "nopad.inference.request_runner",
        "right = Call.start\n"
        "def start(self, *parts):\n"
        "    right(self, *parts)\n"
        "    self.is_new = False\n"
        "Call.start = start",
    ),
    "the coefficient of TRL goes to the config alone": (
        "trainer/loss/test_auxiliary_loss.py::test_the_trainers_log_it",
        "nopad.trainer.with_hf.trainer", "weight_auxiliary_loss = lambda *_: None",
    ),
    "checkpoints keep what a trial computes": (
        "attention/hf/test_interface.py::"
        "test_selective_checkpoints_keep_nothing_of_the_trial_of_a_backend",
        "nopad.attention.backends.backend_check",
        "from contextlib import nullcontext\n"
        "from types import SimpleNamespace\n"
        "def submit(function, *a):\n"
        "    result = function(*a)\n"
        "    return SimpleNamespace(result=lambda: result)\n"
        "ThreadPoolExecutor = lambda count: nullcontext(SimpleNamespace(submit=submit))",
    ),
    "every rank has a verdict of its own": (
        "trainer/monitoring/test_packing_difference.py::test_what_one_rank_finds_stops_all_of_them",
        "nopad.trainer.monitoring.preflight",
        "from nopad.trainer.monitoring import packing_difference\n"
        "nan_max = packing_difference.nan_max = lambda values: list(values)[0]",
    ),
    "a teacher keeps the activations of a long row": (
        "trainer/monitoring/test_packing_difference.py::"
        "test_a_model_that_is_not_trained_keeps_no_long_row",
        "nopad.trainer.monitoring.preflight", "any = lambda flags: True",
    ),
    "a loss of one's own never diverges": (
        "trainer/with_lightning/test_own_steps.py::"
        "test_the_mean_of_an_empty_pack_is_told_apart_from_a_divergence",
        "nopad.trainer.with_lightning.packed_callback", "DIVERGED = 'check its weights'",
    ),
    "weights of zeros alone are filled": (
        "trainer/monitoring/test_packing_difference.py::"
        "test_a_convolution_that_starts_as_the_identity_is_seen",
        "nopad.attention.hf.leak_check",
        "right = zero_weights_filled\n"
        "@contextmanager\n"
        "def zero_weights_filled(model):\n"
        "    trained = [weight for weight in model.parameters() if weight.requires_grad]\n"
        "    for weight in trained:\n"
        "        weight.requires_grad_(False)\n"
        "    with right(model):\n"
        "        for weight in trained:\n"
        "            weight.requires_grad_(True)\n"
        "        yield",
    ),
    "masked logits are compared": (
        "trainer/monitoring/test_packing_difference.py::"
        "test_a_vocabulary_that_is_masked_in_part_is_right_and_hides_nothing",
        "nopad.trainer.monitoring.packing_difference",
        "right, torch = torch, type(torch)('torch')\n"
        "torch.__dict__.update(vars(right))\n"
        "torch.finfo = lambda dtype: type('Range', (), {'min': float('nan'), 'eps': 1e-7})",
    ),
    "any checkpoint is complete": (
        "trainer/with_accelerate/test_checkpoint.py", "nopad.trainer.checkpoint_manifest",
        "find_damage = lambda folder: None",
    ),
    "compiled layers ignore later hooks": (
        "trainer/layers/test_compile_layers.py::"
        "test_a_hook_that_comes_after_the_first_step_changes_compiled_layers",
        "nopad.trainer.layers.compile_layers",
        "DYNAMO['skip_nnmodule_hook_guards'] = True",
    ),
    "any experts are grouped": (
        "trainer/layers/test_experts.py", "nopad.trainer.layers.experts",
        "outputs_match = lambda *_: True",
    ),
    "a resumed run forgets its layers": (
        "trainer/test_layers_by_default.py", "nopad.trainer.with_hf.trainer",
        "right = prepare_layers\n"
        "prepare_layers = lambda *a, saved=None, **k: right(*a, **k)",
    ),
    "a compilation that fails ends the run": (
        "trainer/layers/test_prepare_layers.py", "nopad.trainer.layers.compile_layers",
        "TorchDynamoException = ZeroDivisionError",
    ),
    "a patched class runs our forward": (
        "trainer/layers/test_class_swap.py", "nopad.trainer.layers.class_swap",
        "right = _subclass\n"
        "def _subclass(stock, own, *forwards):\n"
        "    cls, forward = right(stock, own, *forwards), own\n"
        "    for added in forwards:\n"
        "        forward = _with_fallback(added, forward)\n"
        "    cls.forward = forward\n"
        "    return cls",
    ),
    "every forward is compiled": (
        "trainer/layers/test_compile_layers.py", "nopad.trainer.layers.compile_layers",
        "_runs_eagerly = lambda: False",
    ),
    "every pack is compiled": (
        "trainer/layers/test_compile_layers.py::test_one_graph_serves_all_layers_and_packs",
        "nopad.trainer.layers.compile_layers", "torch._dynamo.maybe_mark_dynamic = lambda *_: None",
    ),
    "a validation clears the gradients of a manual step": (
        "trainer/with_lightning/test_own_steps.py::"
        "test_a_validation_inside_a_step_of_ones_own_keeps_its_gradients",
        "nopad.trainer.with_lightning.packed_callback",
        "ManualSteps.has_gradients = property(lambda self: False, lambda self, value: None)",
    ),
    "a flag may be anything": (
        "inference/test_settings.py::test_a_bad_value_is_named_where_it_is_given",
        "nopad.inference.settings", "check_flag = lambda name, value: value",
    ),
    "states pass from document to document": (
        "trainer/loss/test_document_boundaries.py::test_packed_is_one_by_one[mamba2]",
        "nopad.trainer.loss.document_boundaries", "run_by_document = lambda *args, **kwargs: None",
    ),
    "convolutions of compiled layers look back": (
        "trainer/layers/test_compiled_states.py::test_convolutions_are_part_of_their_layer",
        "nopad.trainer.loss.document_boundaries",
        "convolve_by_document = lambda *args, **kwargs: None",
    ),
    "delta rules of compiled layers pass boundaries": (
        "trainer/layers/test_compiled_states.py::test_a_delta_rule_is_an_operator_of_its_layer",
        "nopad.trainer.loss.document_boundaries",
        "right = convolve_by_document\n"
        "def convolve_by_document(module, stock, *args, **kwargs):\n"
        "    def without(module, *args, **kwargs):\n"
        "        return stock(module, *args, **{**kwargs, 'cu_seq_lens_q': None})\n"
        "    return right(module, without, *args, **kwargs)",
    ),
    "a shard is complete before its files": (
        "packing/encoding/test_tokenization.py::"
        "test_a_truncated_shard_is_named_and_written_again",
        "nopad.packing.encoding.tokenization",
        "_read_records = lambda folder, manifest: dict(enumerate((manifest or {}).get('shards', "
        "[])))",
    ),
    "drafts of killed jobs stay": (
        "packing/encoding/test_tokenization.py::"
        "test_a_killed_job_continues_and_ends_with_the_same_bytes",
        "nopad.packing.sources.local_folder", "LocalFolder.remove_drafts = lambda self: None",
    ),
    "processes are never replaced": (
        "packing/encoding/test_tokenization.py::"
        "test_processes_are_replaced_and_the_files_are_the_same[jsonl]",
        "nopad.packing.encoding.tokenization", "islice = lambda tasks, count: tasks",
    ),
    "documents are numbered by shard": (
        "packing/encoding/test_tokenization.py::test_packs_of_tokens_are_those_of_the_rows",
        "nopad.packing.sources.token_store",
        "TokenStore.numbers_in_source = lambda self, documents: "
        "documents - self.first_documents[self.array_of(documents)]",
    ),
    "a corpus has no labels": (
        "packing/encoding/test_tokenization.py::test_packs_of_tokens_are_those_of_the_rows",
        "nopad.packing.encoding.shard_job",
        "right = _join\n"
        "_join = lambda samples: (*right(samples)[:2], None)",
    ),
    "tokens of any tokenizer are read": (
        "packing/encoding/test_tokenization.py::test_another_tokenizer_or_template_is_refused",
        "nopad.packing.pipeline", "check_tokenizer = lambda *_: None",
    ),
    "nobody looks whether a source changes": (
        "packing/encoding/test_tokenization.py::"
        "test_a_source_that_changes_while_it_is_read_is_noticed",
        "nopad.packing.encoding.shard_job", "_file_stamps = lambda source: []",
    ),
    "nobody locks a folder of tokens": (
        "packing/encoding/test_tokenization.py::test_two_processes_do_not_write_to_one_folder",
        "nopad.packing.sources.local_folder",
        "from contextlib import nullcontext\n"
        "LocalFolder.lock = lambda self, **_: nullcontext()",
    ),
    "workers outlive a killed job": (
        "packing/encoding/test_tokenization.py::"
        "test_workers_end_with_the_process_that_started_them",
        "nopad.packing.encoding.tokenization", "_exit_with_parent = lambda: None",
    ),
    "any ids of a faster library are taken": (
        "packing/encoding/test_text_encoder.py", "nopad.packing.encoding.text_encoder",
        "TextEncoder.is_exact = lambda self, texts: True",
    ),
    "windows repeat documents": (
        "packing/readers/test_planned.py", "nopad.packing.readers.planned",
        "right = PlannedPacks.document_order\n"
        "PlannedPacks.document_order = lambda self, epoch, window: right(self, epoch, 0)",
    ),
    "the state forgets the window": (
        "packing/readers/test_planned.py::test_a_resume_plans_its_own_window_and_those_after_it",
        "nopad.packing.ordering.rank_share",
        "Position.to_json = lambda self: {k: v for k, v in asdict(self).items() "
        "if k not in WINDOW}",
    ),
    "any token opens the endpoint": (
        "inference/endpoint/test_server.py::test_every_route_needs_the_token",
        "nopad.inference.endpoint.server",
        "hmac = type('hmac', (), {'compare_digest': staticmethod(lambda sent, expected: True)})",
    ),
    "a body of any size is read": (
        "inference/endpoint/test_server.py::"
        "test_bodies_and_headers_are_limited_whatever_the_client_declares",
        "nopad.inference.endpoint.server", "MAX_BODY_BYTES = 1 << 40",
    ),
    "a client that goes away keeps its request": (
        "inference/endpoint/test_server.py::test_a_client_that_goes_away_frees_its_request",
        "nopad.inference.endpoint.request_queue",
        "RequestQueue.abort_cancelled = lambda self: None",
    ),
    "a server that closes drops its requests": (
        "inference/endpoint/test_server.py::test_closing_finishes_every_request",
        "nopad.inference.endpoint.server", "Server.close = lambda self: self._queue.close()",
    ),
    "tokens of equal text share a log-probability": (
        "inference/endpoint/test_server.py::"
        "test_tokens_of_equal_text_keep_separate_log_probabilities",
        "nopad.inference.endpoint.openai_api",
        "Answer.top_logprobs = lambda self, entry: {\n"
        "    self._name(token): logprob for token, logprob in\n"
        "    {entry.token_id: entry.logprob, **entry.top_logprobs}.items()}",
    ),
    "the time of requests is not charged": (
        "inference/endpoint/test_request_queue.py::"
        "test_time_beyond_the_share_is_charged_to_later_windows",
        "nopad.inference.endpoint.request_queue",
        "TimeShare.pause = lambda self: __import__('contextlib').nullcontext()",
    ),
    "time is spent before it is saved": (
        "inference/endpoint/test_request_queue.py::"
        "test_requests_take_at_most_their_share_of_the_time[0.0-0.0]",
        "nopad.inference.endpoint.request_queue",
        "wait = TimeShare.wait\n"
        "TimeShare.wait = lambda self, seconds: wait(self, 0.0)",
    ),
    "a request may stop the training for any time": (
        "inference/endpoint/test_request_queue.py::"
        "test_a_request_that_would_stop_the_training_for_long_is_refused",
        "nopad.inference.endpoint.request_queue",
        "RequestQueue.expected_seconds = lambda self, request: 0.0",
    ),
    "warm-up counts as the time of a step": (
        "inference/endpoint/test_request_queue.py::"
        "test_a_slow_first_step_does_not_refuse_later_requests",
        "nopad.inference.endpoint.request_queue",
        "from statistics import mean as median\n"
        "_MIN_STEPS = 1",
    ),
    "an answer goes to another client": (
        "inference/endpoint/test_stress.py::test_many_clients_of_every_kind_lose_no_request[20-8]",
        "nopad.inference.endpoint.request_queue",
        "deliver = RequestQueue._deliver\n"
        "RequestQueue._deliver = lambda self, results: deliver(\n"
        "    self, [(r, x) for (r, _), (_, x) in zip(results, results[::-1])])",
    ),
    "the training step is that of the last answer": (
        "trainer/evaluation/test_live_requests.py::"
        "test_the_server_names_the_training_step_without_any_request[hf-step]",
        "nopad.inference.endpoint.server",
        "Server.training_step = property(lambda self: self._queue.step, lambda self, step: None)",
    ),
    "responses are counted without their route": (
        "inference/endpoint/test_server.py::test_metrics_count_responses_by_route_and_status",
        "nopad.inference.endpoint.server",
        "Route = type('Route', (Route,), {'path': property(\n"
        "    lambda self: '', lambda self, path: None)})",
    ),
    "a server that is terminated fails": (
        "cli/test_serve.py::test_a_checkpoint_is_served_until_a_signal[15-0]", "nopad.cli.serve",
        "signal = type('Signals', (), {'SIGTERM': 15, 'signal': staticmethod(print)})",
    ),
    "a full queue is an invalid request": (
        "inference/endpoint/test_server.py::test_a_full_queue_answers_429",
        "nopad.inference.endpoint.openai_api",
        "body = ApiError.body\n"
        "ApiError.body = lambda self: {\n"
        "    'error': body(self)['error'] | {'type': 'invalid_request_error'}}",
    ),
    "shown completions alone are saved": (
        "trainer/evaluation/test_generation_eval.py::"
        "test_all_completions_of_every_evaluation_are_appended_to_a_file",
        "nopad.trainer.evaluation.generation_eval",
        "append = append_completions\n"
        "append_completions = lambda path, step, name, rows: append(path, step, name, rows[:1])",
    ),
    "live requests leave another attention": (
        "trainer/evaluation/test_live_requests.py::"
        "test_training_with_live_requests_is_bitwise_training_without[accelerate]",
        "nopad.inference.live_model.borrow",
        "from contextlib import nullcontext\n"
        "nopad_attention = lambda modules: nullcontext(\n"
        "    setattr(modules[0].config, '_attn_implementation_internal', 'eager'))",
    ),
    "an answer does not name its step": (
        "trainer/evaluation/test_live_requests.py::"
        "test_training_with_live_requests_is_bitwise_training_without[accelerate]",
        "nopad.inference.endpoint.request_queue",
        "run = RequestQueue.run\n"
        "RequestQueue.run = lambda self, step=None, last=False: run(self, None, last)",
    ),
    "processed log-probabilities are raw": (
        "inference/execution/test_sampler.py::"
        "test_processed_logprobs_are_those_of_the_distribution_sampled_from",
        "nopad.inference.execution.model_runner",
        "process_logits = lambda logits, *_: logits",
    ),
    "every draft is accepted": (
        "inference/test_speculative_decoding.py::test_completions_are_those_without",
        "nopad.inference.scheduling.speculation",
        "right = Speculation.verify\n"
        "def verify(self, step, sampled, now):\n"
        "    inputs = step.token_ids[step.logits_indices].tolist()\n"
        "    requests = step.sampled_requests\n"
        "    for row in range(1, len(sampled)):\n"
        "        if requests[row] is requests[row - 1]:\n"
        "            sampled[row - 1] = inputs[row]\n"
        "    return right(self, step, sampled, now)\n"
        "Speculation.verify = verify",
    ),
    "tokens written together have one scale": (
        "inference/test_quantized_cache.py::"
        "test_completions_are_those_of_a_model_with_rounded_keys",
        "nopad.attention.backends.quantized_pages",
        "right = quantize\n"
        "def quantize(x, dtype):\n"
        "    rows, scales = right(x, dtype)\n"
        "    return rows, scales[:1].expand_as(scales)",
    ),
    "a copied page keeps the scales it had": (
        "inference/test_quantized_cache.py::test_pages_are_copied_with_their_scales",
        "nopad.attention.paging.cache",
        "right = PagedCache.copy_pages\n"
        "def copy_pages(self, *pages):\n"
        "    count = len(self.layer_shapes)\n"
        "    scales = [[x.clone() for x in self.layer(i)[2:]] for i in range(count)]\n"
        "    right(self, *pages)\n"
        "    for i, before in enumerate(scales):\n"
        "        for tensor, old in zip(self.layer(i)[2:], before):\n"
        "            tensor.copy_(old)\n"
        "PagedCache.copy_pages = copy_pages",
    ),
    "a pack has no boundaries": (
        "trainer/with_trl/test_preference_trainers.py", "nopad.trainer.loss.packed_forward",
        "right = unpacked_forward\n"
        "def unpacked_forward(forward, budget, *a, **k):\n"
        "    one = lambda **k: forward(\n"
        "        input_ids=k['input_ids'], use_cache=False,\n"
        "        cu_seq_lens_q=k['cu_seq_lens_q'][[0, -1]], max_length_q=k['input_ids'].shape[1])\n"
        "    return right(one, budget, *a, **k)",
    ),
    "a sequence of a pack is moved": (
        "trainer/with_trl/test_preference_trainers.py", "nopad.trainer.loss.packed_forward",
        "right = unpacked_forward\n"
        "def unpacked_forward(*a, **k):\n"
        "    outputs = right(*a, **k)\n"
        "    outputs.last_hidden_state = outputs.last_hidden_state.flip(0)\n"
        "    return outputs",
    ),
    "margins are left out of the loss": (
        "trainer/with_trl/test_preference_trainers.py::test_packed_rewards_equal_padded_rewards",
        "nopad.trainer.with_trl.preference_trainers",
        "right = PackedRewardTrainer.compute_loss\n"
        "PackedRewardTrainer.compute_loss = lambda self, model, inputs, *a, **k: right(\n"
        "    self, model, {n: v for n, v in inputs.items() if n != 'margin'}, *a, **k)",
    ),
    "every tokenizer of the reference passes": (
        "trainer/with_trl/test_preference_trainers.py::"
        "test_a_reference_with_another_tokenizer_is_refused",
        "nopad.trainer.with_trl.packed_model",
        "import transformers\n"
        "def none(*a, **k): raise OSError\n"
        "transformers.AutoTokenizer.from_pretrained = none",
    ),
    "tools are never called": (
        "trainer/with_trl/test_rollouts.py::test_tools_and_environments_are_those_of_trl",
        "nopad.trainer.with_trl.rollouts",
        "right = LiveRolloutMixin.__init__\n"
        "def __init__(self, *a, **k):\n"
        "    right(self, *a, **k)\n"
        "    self.tools = []\n"
        "LiveRolloutMixin.__init__ = __init__",
    ),
    "a rank has the rollouts of another": (
        "trainer/with_trl/test_ranks.py::test_two_ranks_train_as_one",
        "nopad.trainer.with_trl.rollouts",
        "LiveRolloutMixin._sampling_params = (\n"
        "    lambda self, *a, right=LiveRolloutMixin._sampling_params: {\n"
        "        **right(self, *a), 'seed': self.state.global_step})",
    ),
    "every rollout has one seed": (
        "trainer/with_trl/test_rollouts.py", "nopad.trainer.with_trl.rollouts",
        "right = LiveRolloutMixin._sampling_params\n"
        "LiveRolloutMixin._sampling_params = lambda self, *a: {**right(self, *a), 'seed': 0}",
    ),
    "the step is not in the seed": (
        "trainer/with_trl/test_rollouts.py::"
        "test_a_killed_run_continues_with_the_same_rollouts_and_weights",
        "nopad.trainer.with_trl.rollouts",
        "calls = iter(range(1 << 20))\n"
        "LiveRolloutMixin._rollout_seed = lambda self: next(calls)",
    ),
    "rollouts report raw log-probabilities": (
        "trainer/with_trl/test_rollouts.py::"
        "test_in_batch_invariant_mode_the_rollouts_have_the_bits_of_the_training_forward",
        "nopad.trainer.with_trl.rollouts",
        "right = LiveRolloutMixin._sampling_params\n"
        "LiveRolloutMixin._sampling_params = lambda self, *a: {\n"
        "    **right(self, *a), 'logprobs_mode': 'raw'}",
    ),
    "a damaged checkpoint is resumed": (
        "recipes/test_trl_recipes.py::"
        "test_grpo_resumes_with_the_weights_of_an_uninterrupted_run",
        "nopad.trainer.with_hf.intact_checkpoints",
        "latest_intact_checkpoint = lambda folder: max(folder.glob('checkpoint-*'))",
    ),
    "Axolotl counts the steps": (
        "integrations/test_axolotl.py::test_steps_are_those_of_packs_not_of_axolotl_s_batches",
        "nopad.integrations.axolotl",
        "right = NopadPlugin.get_training_args\n"
        "NopadPlugin.get_training_args = lambda self, cfg: {**right(self, cfg), 'max_steps': 99}",
    ),
    "settings of Axolotl are ignored": (
        "integrations/test_axolotl.py::test_settings_of_axolotl_without_effect_are_refused",
        "nopad.integrations.axolotl", "check_settings = lambda cfg: None",
    ),
    "every token is in the loss": (
        "cli/test_inspect_data.py::test_loss_tokens_duplicates_and_extremes_are_named",
        "nopad.cli.data_report.composition",
        "right = Composition.add\n"
        "Composition.add = lambda self, tokens, labels: right(self, tokens, None)",
    ),
    "a mixture has equal weights": (
        "cli/test_inspect_data.py::test_a_mixture_is_inspected_with_its_weights",
        "nopad.cli.inspect_data",
        "right = weighted_sources\n"
        "weighted_sources = lambda names: [\n"
        "    (name, weight and 1.0) for name, weight in right(names)]",
    ),
    "the doctor builds any type as a causal LM": (
        "cli/test_doctor.py::"
        "test_an_encoder_decoder_is_refused_with_the_sentence_of_the_trainers",
        "nopad.cli.doctor_heads",
        "head_class = lambda config: None",
    ),
    "the doctor compares states that continue through packs": (
        "cli/test_doctor.py::"
        "test_parity_of_a_model_with_a_state_is_that_of_its_training_on_packs[lfm2]",
        "nopad.cli.doctor_parity", "attach_loss = lambda model: None",
    ),
    "skipped rows are numbered as samples": (
        "cli/test_inspect_data.py::test_json_has_the_printed_figures_and_every_skipped_row",
        "nopad.cli.data_report.row_samples",
        "def encode(self, rows, encoder):\n"
        "    rows = list(rows)\n"
        "    yield from encode_rows(rows, encoder)\n"
        "    self.add_all(iter(rows), encoder)\n"
        "RowSamples.encode = encode",
    ),
    "some packs of small data are examined": (
        "cli/test_inspect_data.py::"
        "test_every_sample_of_small_data_is_examined_and_of_ready_tokens_as_many_as_asked",
        "nopad.cli.inspect_data",
        "right = stored_lengths\n"
        "stored_lengths = lambda data, sources, composition, rows, most: right(\n"
        "    data, sources, composition, rows, most or 4)",
    ),
    "each source numbers its samples from 0": (
        "cli/test_inspect_data.py::test_samples_of_a_mixture_have_the_lines_of_their_files",
        "nopad.cli.data_report.row_samples",
        "right = RowSamples.add_all\n"
        "def add_all(self, rows, encoder):\n"
        "    self.count = 0\n"
        "    right(self, rows, encoder)\n"
        "RowSamples.add_all = add_all",
    ),
    "a state of the request before is not reset": (
        "inference/test_stateful_models.py::"
        "test_chunks_of_a_prompt_continue_its_state_in_rows_used_before[lfm2]",
        "nopad.attention.hf.state_pool",
        "right = StatePool.step\n"
        "StatePool.step = lambda self, rows, starts, lengths: right(\n"
        "    self, rows, [1 + start for start in starts], lengths)",
    ),
    "requests have the states of others": (
        "inference/test_stateful_models.py::"
        "test_chunks_of_a_prompt_continue_its_state_in_rows_used_before[lfm2]",
        "nopad.attention.hf.state_pool",
        "right = StatePool.step\n"
        "StatePool.step = lambda self, rows, *a: right(self, [*rows][::-1], *a)",
    ),
    "a chunk does not see the convolution before": (
        "inference/test_stateful_models.py::"
        "test_chunks_of_a_prompt_continue_its_state_in_rows_used_before[bamba]",
        "nopad.attention.hf.state_pool",
        "right = SequenceGroup.read\n"
        "def read(self, states):\n"
        "    conv, recurrent = right(self, states)\n"
        "    return conv * (self.length == 1), recurrent\n"
        "SequenceGroup.read = read",
    ),
    "a captured decode has the states of others": (
        "inference/execution/test_step_graphs.py::"
        "test_decodes_of_models_with_states_are_captured",
        "nopad.attention.hf.state_pool",
        "right = StatePool.decode\n"
        "StatePool.decode = lambda self, rows: right(self, rows.flip(0))",
    ),
    "kernels for states update those of others": (
        "inference/fused/test_compiled_layers.py::"
        "test_functions_that_compute_something_else_are_not_replaced",
        "nopad.inference.fused.state_kernels",
        "right = current_rows\n"
        "current_rows = lambda: right().flip(0)",
    ),
    "a module may lose its state": (
        "inference/test_stateful_models.py::test_a_module_that_loses_its_state_is_refused",
        "nopad.attention.hf.state_pool", "is_nearer = lambda *a: True",
    ),
    "a chunk may ignore a state that hardly matters": (
        "inference/test_stateful_models.py::test_chunks_continue_a_state_that_hardly_matters",
        "nopad.attention.hf.state_pool", "reads_state = lambda *a: True",
    ),
    "a step that failed midway runs again": (
        "inference/test_stateful_models.py::"
        "test_a_step_that_runs_out_of_memory_midway_is_recomputed",
        "nopad.inference.scheduling.scheduler", "Scheduler.preempt_all = lambda self, why: None",
    ),
    "a document is pooled with its neighbour": (
        "trainer/loss/test_heads.py::test_pooling_over_two_documents_is_refused_at_the_start",
        "nopad.trainer.loss.attached_loss",
        "right = run_per_document\n"
        "def run_per_document(*a):\n"
        "    outputs = right(*a)\n"
        "    outputs.logits = outputs.logits + outputs.logits.roll(1, 0)\n"
        "    return outputs",
    ),
    "the first token of a row is pooled": (
        "trainer/loss/test_heads.py", "nopad.trainer.loss.attached_loss",
        "run_per_document = lambda model, forward, inputs: forward(\n"
        "    input_ids=inputs['input_ids'], position_ids=inputs['position_ids'],\n"
        "    attention_mask=None)",
    ),
    "documents have the labels of others": (
        "packing/test_targets.py", "nopad.packing.readers.planned",
        "right = cut_targets\n"
        "cut_targets = lambda targets, *a: right(targets[::-1], *a)",
    ),
    "streamed documents have the labels of others": (
        "packing/test_targets.py::test_every_document_keeps_its_label",
        "nopad.packing.planning.packer",
        "right = cut_targets\n"
        "cut_targets = lambda targets, *a: right(targets[::-1], *a)",
    ),
    "labels of skipped documents go to others": (
        "packing/test_targets.py::test_labels_stay_with_their_documents_if_others_are_skipped",
        "nopad.packing.pipeline",
        "from dataclasses import replace\n"
        "right = drop_bad_documents\n"
        "drop_bad_documents = lambda arrays, *a: [\n"
        "    replace(one, targets=all.targets) for one, all in zip(right(arrays, *a), arrays)]",
    ),
    "predictions are in the order of packs": (
        "trainer/loss/test_heads.py::test_predictions_are_in_the_order_of_the_rows",
        "nopad.trainer.with_hf.trainer",
        "pack_like = lambda train, source, *a: PackedDataset(\n"
        "    source, budget=64, label_column='label', shuffle=False)",
    ),
    "labels of a document weigh the same in any mean": (
        "trainer/loss/test_heads.py::"
        "test_documents_of_a_token_classifier_weigh_the_same_if_asked",
        "nopad.collators.packed",
        "sample_weights = lambda labels, *a: (labels != IGNORE_INDEX).astype(np.float32)",
    ),
    "scores ignore label smoothing": (
        "trainer/loss/test_heads.py::test_label_smoothing_of_scores_is_refused",
        "nopad.trainer.loss.attached_loss",
        "right = score_losses\n"
        "score_losses = lambda *a: right(*a[:4], {})",
    ),
    "classifiers take no arguments of None": (
        "trainer/loss/test_heads.py::"
        "test_adapters_of_a_classifier_learn_from_a_pack_as_from_documents",
        "nopad.trainer.loss.attached_loss",
        "right = run_per_document\n"
        "run_per_document = lambda model, forward, inputs: right(\n"
        "    model, lambda **k: forward(**k, **{n: v for n, v in inputs.items() if v is None}),\n"
        "    inputs)",
    ),
    "a process has eight graphs": (
        "trainer/layers/test_compile_layers.py::"
        "test_models_may_have_more_graphs_than_torch_compile_allows_by_default",
        "nopad.trainer.layers.compile_layers", "del DYNAMO['recompile_limit']",
    ),
    "a checkpoint names the layers that were wanted": (
        "trainer/test_layers_by_default.py::"
        "test_a_run_whose_compilation_failed_is_resumed_with_stock_layers[accelerate]",
        "nopad.trainer.with_accelerate.loader",
        "trained_layers = lambda prepared, saved: 'compiled'",
    ),
    "fp8 is tried on any machine": (
        "trainer/layers/test_fp8.py::test_a_machine_that_cannot_is_told_in_a_line",
        "nopad.trainer.layers.fp8", "why_not_device = lambda device: ''",
    ),
    "fp8 has one scale for all tokens": (
        "trainer/layers/test_fp8.py::test_what_is_not_finite_stays_so_in_its_row_alone",
        "nopad.trainer.layers.fp8_product",
        "right = cast\ncast = lambda x, per_row=False: right(x)",
    ),
    "layers of one model choose those of the next": (
        "trainer/test_layers_by_default.py::"
        "test_layers_of_a_teacher_do_not_choose_those_of_the_student",
        "nopad.trainer.with_accelerate.loader",
        "ways, right = [], prepare_layers\n"
        "def prepare_layers(*a, saved=None, **k):\n"
        "    found = right(*a, saved=ways[-1] if ways else saved, **k)\n"
        "    ways.append(found.way)\n"
        "    return found",
    ),
    "layers that are compiled stay so unsaid": (
        "trainer/layers/test_prepare_layers.py::"
        "test_layers_that_are_compiled_already_stay_as_they_are",
        "nopad.trainer.layers.prepare_layers", "STOCK = None",
    ),
    "any labels are those of any head": (
        "trainer/loss/test_heads.py::test_labels_that_the_head_does_not_learn_are_refused",
        "nopad.packing.dataset",
        "PackedDataset.is_labelled = property(lambda self: True)",
    ),
    "encoders attend to earlier tokens only": (
        "trainer/loss/test_encoders.py", "nopad.attention.hf.interface",
        "right = attend\n"
        "attend = lambda *a, **k: right(*a, **{**k, 'causal': True})",
    ),
    "a window of an encoder ends at the token": (
        "trainer/loss/test_encoders.py::"
        "test_an_encoder_learns_from_a_pack_what_it_learns_one_by_one[ForMaskedLM-ModernBert]",
        "nopad.attention.backends.sdpa",
        "right = causal_mask\n"
        "causal_mask = lambda q, k, w, d, c: right(q, k, w, d)",
    ),
    "RoBERTa counts from 0": (
        "trainer/loss/test_encoders.py", "nopad.trainer.loss.attached_loss",
        "from types import SimpleNamespace\n"
        "prepare_for_packs = lambda model: [SimpleNamespace(remove=list)]",
    ),
    "masks depend on who reads the packs": (
        "collators/test_masked.py::"
        "test_masks_do_not_depend_on_ranks_or_on_where_a_run_was_resumed",
        "nopad.collators.masked",
        "from dataclasses import replace\n"
        "right, calls = MaskedCollator.__call__, iter(range(1 << 20))\n"
        "MaskedCollator.__call__ = lambda self, pack: right(\n"
        "    self, replace(pack, index=next(calls)))",
    ),
    "any collator trains a masked LM": (
        "trainer/loss/test_encoders.py::test_masked_lms_and_their_collator_belong_together",
        "nopad.trainer.monitoring.preflight",
        "MaskedCollator = object",
    ),
    "an embedding is pooled over the pack": (
        "trainer/loss/test_encoders.py::"
        "test_embeddings_of_a_pack_are_those_of_its_documents_alone",
        "nopad.trainer.loss.embeddings",
        "right = pool_documents\n"
        "pool_documents = lambda h, cu, how: right(h, cu[[0, -1]], how).expand(len(cu) - 1, -1)",
    ),
    "the doctor builds encoders as decoders": (
        "trainer/loss/test_encoder_zoo.py::test_packed_is_one_by_one_except_where_listed[bert]",
        "nopad.cli.doctor_heads",
        "right = tiny_config\n"
        "tiny_config = lambda config, **options: right(config)",
    ),
    "the doctor passes any head": (
        "cli/test_doctor.py::test_a_leak_of_an_encoder_is_told",
        "nopad.cli.doctor_heads",
        "leaked_gradient = lambda *a: 0.0",
    ),
    "the doctor loses gradients that are not numbers": (
        "cli/test_doctor.py::test_a_gradient_that_is_not_a_number_is_wrong",
        "nopad.cli.doctor_heads",
        "nan_max = lambda values: max([0.0, *values])",
    ),
    "rows without those held out are not cached": (
        "recipes/support/test_holdout.py::test_tokens_without_held_out_rows_are_cached",
        "nopad.recipes.support.holdout",
        "ExcludingRows.cache_key = lambda self: None",
    ),
    "tokens of images are labels": (
        "packing/encoding/test_image_encoder.py::"
        "test_text_and_completions_with_images_label_text_alone[False-smolvlm]",
        "nopad.packing.encoding.image_encoder",
        "ImageTokenizer.is_image = lambda self, n: np.zeros(n, bool)",
    ),
    "a tokenizer ignores images": (
        "packing/encoding/test_image_encoder.py::"
        "test_a_tokenizer_refuses_images_which_it_would_ignore",
        "nopad.packing.token_ids", "refuse_images = lambda row: None",
    ),
    "positions of images continue from the document before": (
        "packing/test_images.py::"
        "test_positions_restart_in_every_sample_and_images_follow_their_samples",
        "nopad.packing.images",
        "right, end = mrope_positions, [0]\n"
        "def mrope_positions(*a, **k):\n"
        "    found = right(*a, **k) + end[0]\n"
        "    end[0] = found.max() + 1\n"
        "    return found",
    ),
    "an image is cut in two": (
        "packing/test_images.py::test_a_sample_with_images_is_never_cut",
        "nopad.packing.images", "check_uncut = lambda *a: None",
    ),
    "the grid of an image goes to its neighbour": (
        "trainer/test_images.py::"
        "test_the_start_check_passes_images_and_catches_those_of_a_neighbour[qwen2_5_vl]",
        "nopad.collators.media_inputs",
        "right = concatenate\n"
        "concatenate = lambda name, inputs: right(\n"
        "    name, inputs[::-1] if name == 'image_grid_thw' else inputs)",
    ),
    "an image goes to its neighbour": (
        "trainer/test_images.py::"
        "test_a_model_learns_from_packed_images_what_it_learns_one_by_one[smolvlm-nopad]",
        "nopad.collators.media_inputs",
        "right = concatenate\n"
        "concatenate = lambda name, inputs: right(name, inputs[::-1])",
    ),
    "the tower gets the boundaries of the text": (
        "trainer/test_images.py::test_the_tower_attends_image_by_image_under_nopad",
        "nopad.attention.hf.model_types", "is_vision = lambda config: False",
    ),
    "the start check has no images": (
        "trainer/test_images.py::"
        "test_the_start_check_catches_a_tower_whose_images_see_each_other",
        "nopad.trainer.monitoring.preflight", "_image_samples = lambda *a: None",
    ),
    "no front end checks its model": (
        "trainer/monitoring/test_model_faults.py", "nopad.trainer.monitoring.preflight",
        "check_run = lambda *args, **options: []",
    ),
    "a reward is pooled with the document before": (
        "trainer/with_trl/test_preference_trainers.py::test_packed_rewards_equal_padded_rewards",
        "nopad.trainer.loss.packed_forward",
        "right = unpacked_forward\n"
        "def unpacked_forward(*args, **inputs):\n"
        "    outputs = right(*args, **inputs)\n"
        "    outputs.last_hidden_state = outputs.last_hidden_state.roll(1, 0) / 2 + "
        "outputs.last_hidden_state / 2\n"
        "    return outputs",
    ),
    "a trainer keeps the states of documents": (
        "trainer/loss/test_document_boundaries.py::"
        "test_a_step_of_every_front_end_is_that_of_its_documents",
        "nopad.trainer.loss.document_boundaries", "stateful_modules = lambda model: []",
    ),
    "every image has a call of its own": (
        "trainer/test_images.py::"
        "test_an_attached_loss_runs_all_images_of_a_tower_in_one_call",
        "nopad.attention.hf.image_attention", "is_vision = lambda config: False",
    ),
    "all images of a pack are one": (
        "trainer/test_images.py::"
        "test_a_model_learns_from_packed_images_what_it_learns_one_by_one[qwen3_vl-nopad]",
        "nopad.attention.hf.image_attention",
        "right = image_attention\n"
        "image_attention = lambda *args, cu_seq_lens_q, max_length_q, **named: right(\n"
        "    *args, cu_seq_lens_q=cu_seq_lens_q[[0, -1]],\n"
        "    max_length_q=int(cu_seq_lens_q[-1]), **named)",
    ),
    "a hybrid may score": (
        "trainer/with_trl/test_preference_trainers.py::test_rewards_of_a_hybrid_are_refused",
        "nopad.trainer.with_trl.packed_model", "declared_state = lambda model: None",
    ),
    "nobody asks how a model sees images": (
        "trainer/test_images.py::"
        "test_images_that_see_themselves_do_so_without_a_trainer",
        "nopad.attention.hf.interface", "attend_image_spans = lambda out, *a: out",
    ),
    "images see no later token": (
        "attention/test_image_spans.py::"
        "test_outputs_and_gradients_are_those_of_every_pair_of_tokens[None]",
        "nopad.attention.image_spans", "find_spans = lambda *a: []",
    ),
    "images of two documents are one span": (
        "attention/test_image_spans.py::test_spans_end_with_their_documents",
        "nopad.attention.image_spans",
        "right = find_spans\n"
        "find_spans = lambda bounds, *a: right(bounds[[0, -1]], *a)",
    ),
    "the engine ignores images": (
        "inference/test_engine.py::test_messages_with_images_are_refused",
        "nopad.inference.requests.tokenizer_adapter", "has_media = lambda content: False",
    ),
}  # fmt: skip
"""What is wrong, the test that must see it, the module it is in, and how it gets there."""


def test_faults_use_names_that_their_modules_have():
    """Otherwise a fault cannot be put in, and only the slow test below says so."""
    unknown = {}
    for fault, (_, module, code) in FAULTS.items():
        try:
            known = {*vars(importlib.import_module(module)), *dir(builtins)}
        except ImportError:  # Axolotl is not installed
            continue
        if names := unknown_names(code, known):
            unknown[fault] = names
    assert not unknown


def unknown_names(code: str, known: set[str]) -> set[str]:
    """Return the names that code reads before it binds them, and that are not known either."""
    unknown = set()
    for statement in ast.parse(code).body:
        nodes = list(ast.walk(statement))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        assigned = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        local = {node.arg for node in nodes if isinstance(node, ast.arg)} | (stored - assigned)
        read = {name.id for name in names if isinstance(name.ctx, ast.Load)}
        aliases = [node for node in nodes if isinstance(node, ast.alias)]
        defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        known = known | defined | {alias.asname or alias.name for alias in aliases}
        unknown |= read - local - known
        known = known | stored
    return unknown


def test_a_name_that_a_module_no_longer_has_is_seen():
    assert unknown_names("old = gone\ngone = lambda a: old(a, len(b))", {"len"}) == {"gone", "b"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_with_this_fault_the_test_fails(fault):
    node, module, code = FAULTS[fault]
    env = {**os.environ, "NOPAD_FAULT_IN": module, "NOPAD_FAULT": code}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS / "seeded"), env.get("PYTHONPATH", "")])
    options = ["-x", "-p", "no:cacheprovider"]
    options += ["-m", "not gpu"] if "::" in node else []  # a test that is named may be slow
    command = [sys.executable, "-m", "pytest", *options, str(TESTS / node)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500)
    # Threads that a fault leaves behind may abort the process after pytest has reported.
    assert done.returncode in (1, -signal.SIGABRT), (
        f"it passes, or did not run:\n{done.stdout[-3000:]}{done.stderr}"
    )
    assert re.search(r"\b1 failed\b", done.stdout.splitlines()[-1]), done.stdout[-3000:]
