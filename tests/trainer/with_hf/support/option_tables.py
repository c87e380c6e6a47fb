"""Every option of the three trainers, and what becomes of it where the data are packs.

STOCK     read by code of the library that packs do not touch; the value reaches it unchanged
HONOURED  read by code of ours, or about what packs replace; the named test shows the effect
REFUSED   any other value than the default, unless it asks for what packs do anyway
NONE      nothing for packs to do, with the reason
"""

from __future__ import annotations

HF = "trainer/with_hf/test_trainer.py::"
EVAL = "trainer/with_hf/test_eval_sets.py::"
OPTIONS = "trainer/with_hf/test_options.py::"
GRADIENT = HF + "test_the_gradient_of_a_step_is_that_of_its_samples_one_by_one"
WHOLE = HF + "test_every_evaluation_of_a_run_is_of_the_whole_set"
KEPT = HF + ("test_older_checkpoints_go_once_the_new_one_is_complete")
LOADER = OPTIONS + "test_arguments_of_the_loader_reach_it"

TRAINING_STOCK = {
    "output_dir": None, "learning_rate": 1e-3, "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": None, "warmup_steps": 3, "optim": "sgd", "optim_args": None,
    "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7,
    "optim_target_modules": None, "max_grad_norm": 0.5, "bf16": None, "fp16": None,
    "bf16_full_eval": None, "fp16_full_eval": None, "tf32": None,
    "gradient_checkpointing_kwargs": {"use_reentrant": True}, "torch_compile_backend": None,
    "torch_compile_mode": None, "torch_empty_cache_steps": 7, "logging_strategy": "epoch",
    "logging_steps": 3, "logging_first_step": True, "log_on_each_node": False,
    "logging_nan_inf_filter": False, "log_level": "error", "log_level_replica": "error",
    "disable_tqdm": True, "report_to": None, "run_name": "name", "project": "one",
    "trackio_space_id": None, "trackio_bucket_id": None, "trackio_static_space_id": None,
    "eval_delay": 2, "eval_on_start": True, "eval_do_concat_batches": False,
    "eval_use_gather_object": True, "eval_accumulation_steps": 2, "include_for_metrics": ["loss"],
    "batch_eval_metrics": True, "save_only_model": True, "push_to_hub": None,
    "hub_token": None, "hub_private_repo": None, "hub_model_id": "a/b", "hub_strategy": "end",
    "hub_always_push": True, "hub_revision": "main", "load_best_model_at_end": None,
    "metric_for_best_model": "x", "greater_is_better": True,
    "restore_callback_states_from_checkpoint": True, "full_determinism": None, "seed": 7,
    "use_cpu": True, "ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 30,
    "ddp_broadcast_buffers": True, "ddp_static_graph": True, "ddp_backend": None,
    "ddp_timeout": 60, "fsdp": None, "fsdp_config": None, "deepspeed": None, "debug": "",
    "skip_memory_metrics": None,
}  # fmt: skip
"""With a value that is not the default, where it can be set on any machine."""

TRAINING_HONOURED = {
    "num_train_epochs": HF + "test_epochs_may_end_in_the_middle",
    "max_steps": EVAL + "test_a_second_training_continues_with_the_next_packs",
    "gradient_accumulation_steps": GRADIENT,
    "gradient_checkpointing": GRADIENT,
    "torch_compile": GRADIENT,
    "label_smoothing_factor": (
        "trainer/with_lightning/test_packed_callback.py::test_labels_are_smoothed_as_in_the_hf_trainer"
    ),
    "include_num_input_tokens_seen": OPTIONS + "test_tokens_seen_are_those_of_the_packs",
    "eval_strategy": WHOLE,
    "eval_steps": WHOLE,
    "prediction_loss_only": HF + "test_predictions_are_the_logits_of_the_set",
    "save_strategy": KEPT,
    "save_steps": KEPT,
    "save_total_limit": KEPT,
    "accelerator_config": OPTIONS + "test_settings_of_the_stock_loader_are_refused",
    "parallelism_config": (
        "trainer/layouts/test_front_end_layouts.py::"
        "test_weights_answers_and_validation_loss_are_those_of_one_rank"
    ),
    "dataloader_num_workers": GRADIENT,
    "dataloader_pin_memory": LOADER,
    "dataloader_prefetch_factor": LOADER,
    "dataloader_multiprocessing_context": LOADER,
}

TRAINING_NONE = {
    "liger_kernel_config": "read with use_liger_kernel only, which is refused",
    "dataloader_persistent_workers": "a pass covers all epochs of a run, and so do its workers",
    "remove_unused_columns": "packs have no columns",
    "length_column_name": "read with train_sampling_strategy='group_by_length', which is refused",
    "do_train": "for scripts: the Trainer does not read it",
    "do_eval": "for scripts: the Trainer reads eval_strategy",
    "do_predict": "for scripts: the Trainer does not read it",
    "resume_from_checkpoint": "for scripts: the Trainer reads the argument of train()",
    "local_rank": "set by the launcher",
}

SFT_STOCK = (
    "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "activation_offloading",
)  # fmt: skip

SFT_NONE = {
    "packing": "the data are packed",
    "padding_free": "the data are packed",
    "pad_token": "packs are not padded; the tokenizer gets it as usual",
}

LIGHTNING_STOCK = (
    "accelerator", "devices", "num_nodes", "precision", "logger", "callbacks", "min_epochs",
    "max_steps", "min_steps", "max_time", "check_val_every_n_epoch", "num_sanity_val_steps",
    "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "gradient_clip_val",
    "gradient_clip_algorithm", "deterministic", "benchmark", "inference_mode", "profiler",
    "detect_anomaly", "barebones", "plugins", "sync_batchnorm", "default_root_dir",
    "enable_autolog_hparams", "model_registry",
)  # fmt: skip

EPOCHS = "trainer/with_lightning/test_epochs.py::"
VALIDATION = "trainer/with_lightning/test_validation.py::"
FRACTIONS = EPOCHS + "test_a_fraction_of_packs_that_nobody_counts_is_refused"
LIGHTNING_HONOURED = {
    "strategy": (
        "trainer/layouts/test_front_end_layouts.py::"
        "test_weights_answers_and_validation_loss_are_those_of_one_rank"
    ),
    "fast_dev_run": EPOCHS + "test_a_look_whether_a_run_would_work_may_end_inside_a_step",
    "max_epochs": EPOCHS + "test_reloaded_loaders_go_on_where_the_one_before_stood",
    "limit_train_batches": EPOCHS + "test_an_epoch_that_would_end_inside_a_step_is_refused",
    "limit_val_batches": VALIDATION + "test_a_validation_gives_the_mean_of_the_packs_it_looked_at",
    "overfit_batches": VALIDATION + "test_batches_to_overfit_on_are_the_same_in_every_epoch",
    "val_check_interval": FRACTIONS,
    "log_every_n_steps": "trainer/with_lightning/test_packed_callback.py::"
    "test_a_trainer_that_logs_never_trains_all_the_same",
    "accumulate_grad_batches": "trainer/with_lightning/test_packed_callback.py::"
    "test_the_gradient_of_a_step_is_that_of_its_samples_one_by_one",
    "reload_dataloaders_every_n_epochs": EPOCHS
    + "test_reloaded_loaders_go_on_where_the_one_before_stood",
}

LIGHTNING_NONE = {
    "limit_test_batches": "PackedDataModule has no test set",
    "limit_predict_batches": "PackedDataModule has nothing to predict",
    "use_distributed_sampler": "packs have no sampler: PackedDataset gives each rank its own",
}
