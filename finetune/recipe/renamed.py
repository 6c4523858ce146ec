"""Names that other fine-tuning tools use for keys of a recipe: dotted key, or a sentence where there is none."""

from __future__ import annotations

_PLACES: dict[str, str] = {
    "model.id": "base_model model_name model_name_or_path model_path pretrained_model_name_or_path hf_model",
    "model.revision": "model_revision base_model_revision revision_of_model",
    "model.dtype": "bf16 fp16 fp32 tf32 torch_dtype compute_dtype bnb_4bit_compute_dtype precision mixed_precision",
    "model.quantize": "load_in_4bit load_in_8bit quantization quantization_bit quant_type bnb_4bit_quant_type bits",
    "model.double_quantization": "bnb_4bit_use_double_quant use_double_quant double_quant",
    "model.attention": "attn_implementation flash_attention flash_attn use_flash_attention_2 sdp_attention",
    "model.trust_remote_code": "trust_remote",
    "adapter.kind": "use_dora use_lora peft_type peft_method finetuning_type use_peft adapter_type",
    "adapter.rank": "lora_r r lora_rank peft_r",
    "adapter.alpha": "lora_alpha peft_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.target_modules": "lora_target_modules lora_target lora_target_linear lora_modules",
    "data.spec": "dataset datasets dataset_name train_file dataset_path train_data data_path",
    "data.max_tokens": "max_seq_length max_seq_len max_length sequence_len seq_length cutoff_len model_max_length",
    "data.long_rows": "truncation excess_length_strategy truncation_mode",
    "data.train_on": "train_on_inputs assistant_only_loss completion_only_loss mask_history roles_to_train",
    "data.max_train_rows": "max_train_samples max_samples train_samples num_train_samples",
    "data.max_validation_rows": "max_eval_samples max_validation_samples",
    "train.method": "rl trainer training_type stage",
    "train.epochs": "num_train_epochs num_epochs n_epochs epoch",
    "train.max_steps": "num_steps total_steps max_train_steps num_train_steps",
    "train.learning_rate": "lr peak_lr learning_rate_max",
    "train.schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule",
    "train.warmup_share": "warmup_ratio warmup_steps warmup num_warmup_steps lr_warmup_steps",
    "train.floor_share": "min_lr min_lr_rate min_lr_ratio cosine_min_lr_ratio lr_scheduler_kwargs",
    "train.weight_decay": "wd decay",
    "train.max_grad_norm": "gradient_clipping clip_grad clip_grad_norm max_norm grad_clip gradient_clip_val",
    "train.micro_batch_size": "per_device_train_batch_size batch_size train_batch_size device_batch_size",
    "train.gradient_accumulation_steps": "grad_accum accumulation_steps gradient_accumulation grad_acc_steps",
    "train.packing": "sample_packing pack_sequences use_packing group_by_length",
    "train.pack_tokens": "pack_length packing_length pack_size",
    "train.gradient_checkpointing": "activation_checkpointing use_gradient_checkpointing",
    "train.checkpoint_every_steps": "save_steps save_interval checkpoint_interval save_strategy saves_per_epoch",
    "train.keep_checkpoints": "save_total_limit max_checkpoints",
    "train.validate_every_steps": "eval_steps evaluation_strategy eval_strategy eval_interval evals_per_epoch",
    "train.report_to": "wandb_project use_wandb logger loggers trackers",
    "eval.suites": "suite eval_dataset eval_datasets benchmark benchmarks tasks",
    "eval.batch_size": "per_device_eval_batch_size eval_batch_size",
    "eval.baselines": "baseline",
    "name": "run_name experiment_name",
    "extends": "_base_ base base_recipe base_config inherit inherits inherit_from include includes parent",
    "seed": "random_seed data_seed manual_seed",
}

_NO_SUCH_KEY: dict[str, str] = {
    "output_dir": "a run folder is named after the recipe and its digest; choose its parent with FINETUNE_RUNS",
    "overwrite_output_dir": "a run folder belongs to one recipe and is continued, never overwritten; delete the key",
    "resume_from_checkpoint": "the same command continues an interrupted run by itself; delete the key",
    "hub_model_id": "nothing is uploaded by a recipe; delete the key",
    "push_to_hub": "nothing is uploaded by a recipe; delete the key",
    "logging_steps": "every optimizer step is logged to events.jsonl; delete the key",
    "val_set_size": "the split belongs to the dataset spec under data/, so that it never changes with the recipe",
    "test_size": "the split belongs to the dataset spec under data/, so that it never changes with the recipe",
    "chat_template": "the template is the tokenizer's own; delete the key",
    "pad_token": "padding is handled by the pipeline (the end of a turn keeps its loss); delete the key",
    "special_tokens": "padding is handled by the pipeline (the end of a turn keeps its loss); delete the key",
    "dataset_text_field": "columns belong to the dataset spec under data/; delete the key",
}

RECIPE_NAMES_ELSEWHERE: dict[str, str] = {
    name: target for target, names in _PLACES.items() for name in names.split()
} | _NO_SUCH_KEY
