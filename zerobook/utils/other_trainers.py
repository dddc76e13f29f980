"""Names of settings in other trainers, and what does the same in Zerobook: tables, and `translate`, which looks a name up.

The names were taken in July to November 2026 from these files, and nothing else was taken:

- transformers 5.23, ``TrainingArguments``, on which TRL, LLaMA-Factory, ms-swift and FastChat build; ``evaluation_strategy``,
  ``overwrite_output_dir``, ``logging_dir``, ``warmup_ratio`` and others from launch lines of earlier versions
- Axolotl at 067b021 (2026-07-24): src/axolotl/utils/schemas/{config,datasets,model,peft,quantization,training,deprecated}.py,
  examples/llama-3/qlora.yml
- LLaMA-Factory at ff6d4d1 (2026-08-18): src/llamafactory/hparams/{data,finetuning,model,training}_args.py,
  examples/train_lora/qwen3_lora_sft.yaml
- TRL at f2cd577 (2026-07-24): trl/trainer/{model,sft}_config.py, trl/scripts/utils.py
- ms-swift at 3602360 (2026-08-22): swift/arguments/base_args/{base,data,model,quant,template}_args.py,
  swift/arguments/{sft,tuner}_args.py, examples/train/multi-gpu/deepspeed/train_zero3.sh
- torchtune at bd2a0fc (2026-04-23): recipes/configs
- LLaMA-Factory's version 1 at ff6d4d1: examples/v1
- FastChat at 0e6d3e4 (2025-04-12): fastchat/train/{train,train_lora}.py, scripts/train_vicuna_7b.sh
"""

_LENGTH = ("max_seq_length", "block_size", "max_source_length")
_BATCH = ("per_device_train_batch_size",)
_RATE = ("learning_rate",)
_TARGETS = ("lora_target_modules",)
_TRAIN = ("train_file",)
_HELD_OUT = ("validation_file",)
_SHARE = ("validation_split_percentage",)
_TOKENS = ("new_tokens",)

# Name in another trainer -> flags that do the same here, each with a value if only that value does. `translate` names the
# first flag that the recipe has.
FLAGS: dict[str, tuple[str, ...]] = {
    # --- transformers, and what the others take from it
    "optim": ("optimizer",),
    "bf16": ("mixed_precision bf16",),
    "fp16": ("mixed_precision fp16",),
    "save_strategy": ("save_steps",),
    "eval_strategy": ("eval_steps",),
    "evaluation_strategy": ("eval_steps",),
    "logging_strategy": ("logging_steps",),
    "logging_dir": ("output_dir",),
    "overwrite_output_dir": ("resume_from_checkpoint auto",),
    "load_best_model_at_end": ("final_model best",),
    "train_sampling_strategy": ("group_by_length",),
    "data_seed": ("seed",),
    "report_to_wandb": ("report_to wandb",),
    "train_batch_size": ("global_batch_size",),
    "ddp_timeout": ("hang_timeout",),
    # --- Axolotl
    "base_model": ("model_name_or_path",),
    "base_model_config": ("config_name", "model_name_or_path"),
    "revision_of_model": ("model_revision",),
    "tokenizer_config": ("tokenizer_name",),
    "micro_batch_size": _BATCH,
    "batch_size": _BATCH,
    "eval_batch_size": ("per_device_eval_batch_size",),
    "num_epochs": ("num_train_epochs",),
    "lr_scheduler": ("lr_scheduler_type",),
    "sequence_len": _LENGTH,
    "max_packed_sequence_len": _LENGTH,
    "eval_sequence_len": _LENGTH,
    "sample_packing": ("packing",),
    "batch_flattening": ("padding_free",),
    "val_set_size": _SHARE,
    "test_datasets": _HELD_OUT,
    "dataset_prepared_path": ("cache_dir",),
    "dataset_processes": ("preprocessing_num_workers",),
    "pretraining_dataset": ("dataset_name", "train_file"),
    "lora_model_dir": ("adapter_path",),
    "lora_target_linear": ("lora_target_modules all-linear",),
    "lora_modules_to_save": ("modules_to_save",),
    "peft_use_dora": ("adapter dora",),
    "peft_use_rslora": ("adapter rslora",),
    "flash_attention": ("attn_implementation flash_attention_2",),
    "sdp_attention": ("attn_implementation sdpa",),
    "eager_attention": ("attn_implementation eager",),
    "flex_attention": ("attn_implementation flex_attention",),
    "tokens": _TOKENS,
    "special_tokens": _TOKENS,
    "additional_special_tokens": _TOKENS,
    "chat_template_jinja": ("chat_template",),
    "auto_resume_from_checkpoints": ("resume_from_checkpoint auto",),
    "use_tensorboard": ("report_to tensorboard",),
    "wandb_project": ("project",),
    "wandb_name": ("run_name",),
    "mlflow_experiment_name": ("project",),
    "evals_per_epoch": ("eval_steps",),
    "saves_per_epoch": ("save_steps",),
    "activation_offloading": ("activation_checkpointing offload",),
    "selective_checkpointing": ("activation_checkpointing selective",),
    "profiler_steps": ("profile",),
    "bfloat16": ("mixed_precision bf16",),
    "float16": ("mixed_precision fp16",),
    "trackio_project_name": ("project",),
    # --- LLaMA-Factory
    "train_dataset": ("dataset_name", "train_file"),
    "swanlab_experiment_name": ("run_name",),
    "finetuning_type": ("adapter",),
    "lora_rank": ("lora_r",),
    "lora_target": _TARGETS,
    "additional_target": ("modules_to_save",),
    "adapter_name_or_path": ("adapter_path",),
    "use_rslora": ("adapter rslora",),
    "use_dora": ("adapter dora",),
    "pissa_init": ("adapter pissa",),
    "quantization_bit": ("load_in_4bit",),
    "dataset": ("dataset_name", "train_file"),
    "dataset_dir": _TRAIN,
    "eval_dataset": _HELD_OUT,
    "template": ("chat_template",),
    "cutoff_len": _LENGTH,
    "max_samples": ("max_train_samples",),
    "val_size": _SHARE,
    "neat_packing": ("packing",),
    "flash_attn": ("attn_implementation",),
    "add_tokens": _TOKENS,
    "add_special_tokens": _TOKENS,
    "moe_aux_loss_coef": ("router_aux_loss_coef",),
    "train_from_scratch": ("config_name",),
    "tokenized_path": ("cache_dir",),
    "early_stopping_steps": ("early_stopping_patience",),
    "pure_bf16": ("mixed_precision bf16",),
    "compute_dtype": ("mixed_precision",),
    "use_swanlab": ("report_to swanlab",),
    "swanlab_project": ("project",),
    "swanlab_run_name": ("run_name",),
    # --- TRL
    "use_peft": ("adapter lora",),
    "max_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "block_size": _LENGTH,
    "dataset_config": ("dataset_config_name",),
    "dataset_num_proc": ("preprocessing_num_workers",),
    "dataset_streaming": ("streaming",),
    "test_split_size": _SHARE,
    "chat_template_path": ("chat_template",),
    "bnb_4bit_quant_type": ("load_in_4bit",),
    # --- ms-swift
    "model": ("model_name_or_path",),
    "model_id_or_path": ("model_name_or_path",),
    "tuner_type": ("adapter",),
    "train_type": ("adapter",),
    "sft_type": ("adapter",),
    "adapters": ("adapter_path",),
    "target_modules": _TARGETS,
    "target_regex": _TARGETS,
    "val_dataset": _HELD_OUT,
    "split_dataset_ratio": _SHARE,
    "attn_impl": ("attn_implementation",),
    "new_special_tokens": _TOKENS,
    "quant_bits": ("load_in_4bit",),
    "packing_length": _LENGTH,
    "max_model_len": _LENGTH,
    "swanlab_exp_name": ("run_name",),
    "external_plugins": ("hooks",),
    "max_epochs": ("num_train_epochs",),
    "max_new_tokens": ("val_max_target_length",),
    # --- torchtune
    "dataset_val": _HELD_OUT,
    "batch_size_val": ("per_device_eval_batch_size",),
    "run_val_every_n_steps": ("eval_steps",),
    "enable_activation_checkpointing": ("activation_checkpointing full",),
    "enable_activation_offloading": ("activation_checkpointing offload",),
    # --- FastChat, and launch lines that were made after it
    "data_path": _TRAIN,
    "eval_data_path": _HELD_OUT,
    "model_max_length": _LENGTH,
    "lora_weight_path": ("adapter_path",),
    "q_lora": ("load_in_4bit",),
    # --- everyday spellings
    "lr": _RATE,
    "epochs": ("num_train_epochs",),
    "gradient_accumulation": ("gradient_accumulation_steps",),
    "precision": ("mixed_precision",),
    "use_lora": ("adapter lora",),
    "qlora": ("load_in_4bit",),
    "load_4bit": ("load_in_4bit",),
    "load_8bit": ("load_in_8bit",),
}

_LAUNCHER = "The launcher takes it: accelerate launch {} RECIPE."
_STRATEGY = "The strategy file says how a run is spread: accelerate launch --config_file accelerate_configs/{}.yaml RECIPE."
# Name in another trainer -> a sentence that says what to do here instead.
SENTENCES = {
    "deepspeed": _STRATEGY.format("zero2"),
    "fsdp": _STRATEGY.format("fsdp"),
    "fsdp_config": _STRATEGY.format("fsdp"),
    "fsdp_version": _STRATEGY.format("fsdp"),
    "fsdp_transformer_layer_cls_to_wrap": _STRATEGY.format("fsdp"),
    "parallelism_config": _STRATEGY.format("fsdp_hybrid"),
    "dp_shard_size": _STRATEGY.format("fsdp_hybrid"),
    "dp_replicate_size": _STRATEGY.format("fsdp_hybrid"),
    "tensor_parallel_size": _STRATEGY.format("fsdp_tensor"),
    "context_parallel_size": _STRATEGY.format("fsdp_context"),
    "sequence_parallel_size": _STRATEGY.format("zero3_sequence"),
    "sequence_parallel_degree": _STRATEGY.format("zero3_sequence"),
    "zero_hpz_partition_size": _STRATEGY.format("zero3_hpz"),
    "ddp_find_unused_parameters": _STRATEGY.format("ddp"),
    "dist_config": _STRATEGY.format("fsdp"),
    "fsdp_cpu_offload": _STRATEGY.format("fsdp_offload"),
    "tensor_parallel_dim": _STRATEGY.format("fsdp_tensor"),
    "data_parallel_shard_dim": _STRATEGY.format("fsdp_hybrid"),
    "data_parallel_replicate_dim": _STRATEGY.format("fsdp_hybrid"),
    "context_parallel_dim": _STRATEGY.format("fsdp_context"),
    "sequence_parallel": _STRATEGY.format("zero3_sequence"),
    "strategy": "The launcher takes it: zerobook launch --strategy NAME RECIPE.",
    "config_file": _LAUNCHER.format("--config_file FILE"),
    "num_processes": _LAUNCHER.format("--num_processes N"),
    "num_machines": _LAUNCHER.format("--num_machines N"),
    "machine_rank": _LAUNCHER.format("--machine_rank N"),
    "main_process_ip": _LAUNCHER.format("--main_process_ip HOST"),
    "main_process_port": _LAUNCHER.format("--main_process_port N"),
    "nproc_per_node": _LAUNCHER.format("--num_processes N"),
    "nnodes": _LAUNCHER.format("--num_machines N"),
    "node_rank": _LAUNCHER.format("--machine_rank N"),
    "master_addr": _LAUNCHER.format("--main_process_ip HOST"),
    "master_port": _LAUNCHER.format("--main_process_port N"),
    "use_cpu": "The launcher chooses the device: write use_cpu: true into the Accelerate YAML.",
    "local_rank": "The launcher sets it: start the recipe with accelerate launch.",
    "do_train": "A recipe always trains. Drop it.",
    "do_eval": "A recipe evaluates at its end, and every --eval_steps. Drop it.",
    "stage": "The recipe says what is trained: recipes/causal_lm.py or recipes/lora_finetune.py. Drop it.",
    "task_type": "The recipe says what is trained. Drop it.",
    "rl": "The recipe says what is trained. Drop it.",
    "dataset_text_field": "The column of a text is named text or content. Rename it in the data.",
    "train_on_inputs": "The loss of a chat is on its answers, unless assistant_only_loss is false.",
    "train_on_prompt": "The loss of a chat is on its answers, unless assistant_only_loss is false.",
    "assistant_only_loss": "The loss of a chat is on its answers. Drop it.",
    "completion_only_loss": "The loss of a prompt with a completion is on the completion. Drop it.",
    "remove_unused_columns": "Columns that are not used are left out and named. Drop it.",
    "lazy_preprocess": "Data is prepared once and kept; --streaming prepares it during the training.",
    "lazy_tokenize": "Data is prepared once and kept; --streaming prepares it during the training.",
    "pad_to_sequence_len": "Rows are padded to the longest of their batch. Drop it.",
    "save_safetensors": "Weights are always saved as safetensors. Drop it.",
    "bnb_4bit_compute_dtype": "It is the dtype of --mixed_precision. Drop it.",
    "bnb_4bit_use_double_quant": "--load_in_4bit always quantises twice. Drop it.",
    "use_bnb_nested_quant": "--load_in_4bit always quantises twice. Drop it.",
    "double_quantization": "--load_in_4bit always quantises twice. Drop it.",
    "model_type": "The model's config.json says it. Drop it.",
    "tokenizer_type": "The tokenizer's own files say it. Drop it.",
    "type_of_model": "The model's config.json says it. Drop it.",
    "activation_checkpointing_kwargs": "--activation_checkpointing takes full, selective, every:N or offload.",
    "gradient_checkpointing_kwargs": "--activation_checkpointing takes full, selective, every:N or offload.",
    "torch_compile_backend": "--torch_compile takes no backend. Drop it.",
    "torch_compile_mode": "--torch_compile takes no mode. Drop it.",
    "disable_gradient_checkpointing": "Nothing is recomputed unless --activation_checkpointing says so. Drop it.",
    "agent_template": "The chat template renders tools and calls: --chat_template.",
    "no_save_optim": "A checkpoint holds all that a run needs to go on. Drop it.",
    "save_only_model": "A checkpoint holds all that a run needs to go on. Drop it.",
}

# Names in other trainers of what Zerobook does not have. For these, the flag that is spelt most like it is not suggested.
ABSENT = {
    "neftune_noise_alpha",
    "noisy_embedding_alpha",
    "label_smoothing_factor",
    "push_to_hub",
    "hub_model_id",
    "hub_token",
    "hub_strategy",
    "wandb_entity",
    "wandb_watch",
    "wandb_log_model",
    "use_unsloth",
    "use_liger_kernel",
    "enable_liger_kernel",
    "loraplus_lr_ratio",
    "use_galore",
    "use_badam",
    "lora_bias",
    "lora_fan_in_fan_out",
    "lora_on_cpu",
    "rope_scaling",
    "shift_attn",
    "s2_attention",
    "use_llama_pro",
    "relora",
    "unfrozen_parameters",
    "freeze_trainable_layers",
    "plot_loss",
    "ddp_backend",
    "tf32",
    "metric_for_best_model",
    "greater_is_better",
    "logging_first_step",
    "auto_find_batch_size",
    "restore_callback_states_from_checkpoint",
    "enable_jit_checkpoint",
    "dataloader_in_order",
    "eval_accumulation_steps",
    "eval_delay",
    "lr_scheduler_kwargs",
    "label_names",
    "optim_args",
    "hub_revision",
    "dataloader_persistent_workers",
    "optim_target_modules",
    "truncation_mode",
    "truncation_strategy",
    "loss_scale",
    "system",
    "default_system",
    "model_author",
    "model_name",
    "init_weights",
    "vllm",
    "trl",
    "plugins",
    "eval_sample_packing",
    "eta_min",
    "model_config",
    "experts_implementation",
    "lora_o_kernel",
    "lora_qkv_kernel",
    "lora_mlp_kernel",
    "batching_strategy",
    "kt_weight_path",
    "loss_type",
    "port",
    "host",
    "checkpointer",
    "max_steps_per_epoch",
    "optimizer_in_bwd",
    "xformers_attention",
    "dataloader_pin_memory",
    "dataloader_drop_last",
}

# Recipe -> those of its flags that not every recipe has.
OTHER_RECIPES = {
    "recipes/lora_finetune.py": {
        "adapter",
        "adapter_path",
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "modules_to_save",
        "load_in_4bit",
        "load_in_8bit",
    },
    "recipes/causal_lm.py": {"config_name"},
    "recipes/seq2seq_chatbot.py": {"val_max_target_length"},
}

# Flag -> a value in another trainer -> the value of the flag here.
VALUES: dict[str, dict[str, str]] = {
    "adapter": {"qlora": "lora, with load_in_4bit"},
    "attn_implementation": {
        "fa2": "flash_attention_2",
        "flash_attn": "flash_attention_2",
        "flash_attention_3": "flash_attention_2",
        "kernels-community/vllm-flash-attn3": "flash_attention_2",
        "xformers": "sdpa",
        "disabled": "eager",
    },
    "dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"},
    "lr_scheduler_type": {"cosine_with_restarts": "cosine", "cosine_with_min_lr": "cosine"},
    "mixed_precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "no", "fp32": "no"},
    "optimizer": {
        "adamw_hf": "adamw",
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "torch.optim.AdamW": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "adamw_torch_8bit": "adamw_8bit",
        "paged_adamw_32bit": "paged_adamw",
    },
}


def translate(name: str, flags: set[str], prefix: str = "") -> str | None:
    """Return a sentence that says what to use instead of a setting of another trainer; None if its name is not known.

    Args:
        name: as typed, with underscores.
        flags: names of the recipe's flags.
        prefix: what stands before a flag in the sentence: ``--``, or nothing for keys of a YAML file.
    """
    # A candidate is a flag, or a flag and a value, such as "mixed_precision bf16".
    candidates = FLAGS.get(name, (name,))
    # Prefer a flag of this recipe, then a flag of another recipe, then a sentence.
    for candidate in candidates:
        if candidate.split()[0] in flags:
            return f"Did you mean {prefix}{candidate}?"
    for candidate in candidates:
        for recipe, recipe_flags in OTHER_RECIPES.items():
            if candidate.split()[0] in recipe_flags:
                return f"{recipe} takes {prefix}{candidate}."
    if name in SENTENCES:
        return SENTENCES[name]
    return "There is no such setting here." if name in ABSENT else None
