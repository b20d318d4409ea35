"""LLaMA-Factory's keys one by one, as of 2026, with those of the Hugging Face Trainer that it takes: data only.

What several keys decide together is in `llamafactory`.
"""

from __future__ import annotations

from typing import Any

from jaxmeg.migrate.core import (
    JOINT,
    NoCounterpart,
    Table,
    To,
    differs,
    equals,
    flag,
    never,
    not_built,
    not_needed,
    number,
    text,
    whole,
)

LORA = not_built("LoRA; all weights are trained")
IMPORT = not_built("import of Hugging Face models: the model starts from random weights; --set model.preset=NAME picks a shape", off=never)
DATASETS = differs("a name in LLaMA-Factory's list of datasets: --set data.train=PATH of a .txt, .jsonl or .parquet file", off=never)
CHAT = not_built("chat templates and loss masks", off=never)
PREFERENCES = not_built("training on preferences")
MULTIMODAL = not_built("images, video and audio")
FREEZING = not_built("frozen weights")
QUANTISED = not_built("quantised weights")
OTHER_OPTIMIZER = not_built("this optimizer; optim.name says which one runs")
OTHER_LOSS = not_built("this loss; a run trains on the mean loss a token")
GENERATION = not_built("generation beyond the sample at the end of a run")
EXPORT = not_built("export of models", off=never)
FP8 = differs("FP8 has one scale a tensor, taken anew in each product: --set precision.fp8=true")
HUB = not_needed("nothing is fetched and nothing is sent")
KERNELS = not_needed("XLA and cuDNN choose kernels and fusions")
READING = not_needed("texts are tokenised once and rows are read by index")
LOADING = not_needed("data.prefetch batches are read ahead")
RUNNING = not_needed("processes and devices are found without it; see the section distributed")
LOGGING = not_needed("the log, metrics.jsonl and TensorBoard have it")
PROFILE = not_needed("--profile traces updates")


def _reports(value: Any) -> bool:
    """Whether TensorBoard events are written; other services have no counterpart."""
    names = {str(name).lower() for name in (value if isinstance(value, list) else [value])}
    if names & {"tensorboard", "all"}:
        return True
    if names - {"none", "null"}:
        raise NoCounterpart("a run writes TensorBoard events and metrics.jsonl")
    return False


TABLE: Table = {
    # model, method
    **dict.fromkeys(("model_name_or_path", "adapter_name_or_path"), IMPORT),
    "train_from_scratch": not_needed("weights are random at the start"),
    "stage": not_built("this kind of training: the run trains on every token of its text", off=equals("pt")),
    "finetuning_type": not_built("training a part of the weights: all are trained", off=equals("full")),
    "do_train": not_needed("a run trains"),
    "do_predict": GENERATION,
    "predict_with_generate": GENERATION,
    **dict.fromkeys(("lora_*", "loraplus_*", "use_rslora", "use_dora", "pissa_*", "additional_target", "create_new_adapter",
                     "oft_*", "module_dropout"), LORA),
    **dict.fromkeys(("freeze_*", "use_llama_pro"), FREEZING),
    **dict.fromkeys(("pref_*", "dpo_*", "kto_*", "ppo_*", "simpo_*", "ref_model*", "reward_model*", "ld_alpha"), PREFERENCES),
    **dict.fromkeys(("use_dft_loss", "use_asft_loss", "asft_alpha", "use_eaft_loss", "eaft_alpha", "label_smoothing_factor",
                     "neftune_noise_alpha", "moe_aux_loss_coef"), OTHER_LOSS),
    **dict.fromkeys(("quantization_*", "double_quantization"), QUANTISED),
    "mixture_of_depths": not_built("this kind of model"),
    "rope_scaling": not_built("scaling of rotary frequencies"),
    "shift_attn": not_built("shifted attention"),
    **dict.fromkeys(("use_mca", "use_megatron_bridge", "megatron_bridge_args", "use_hyper_parallel", "hyper_parallel_*", "use_kt",
                     "kt_*"), differs("another engine; a run here has its own")),
    **dict.fromkeys(("resize_vocab", "split_special_tokens", "add_tokens", "add_special_tokens", "new_special_tokens_config",
                     "init_special_tokens"), differs("the vocabulary is that of data.tokenizer")),
    **dict.fromkeys(("flash_attn", "enable_liger_kernel", "use_unsloth", "use_unsloth_gc", "use_v1_kernels", "low_cpu_mem_usage",
                     "use_reentrant_gc", "upcast_layernorm", "upcast_lmhead_output", "torch_compile", "torch_compile_*", "use_kv_cache",
                     "device_map", "gradient_checkpointing_kwargs"), KERNELS),
    **dict.fromkeys(("trust_remote_code", "use_fast_tokenizer", "cache_dir", "model_revision", "adapter_folder", "hf_hub_token",
                     "ms_hub_token", "om_hub_token", "push_to_hub*", "hub_*"), HUB),
    **dict.fromkeys(("export_*",), EXPORT),
    **dict.fromkeys(("infer_*", "vllm_*", "sglang_*", "offload_folder", "temperature", "top_p", "top_k", "do_sample", "max_new_tokens",
                     "num_beams", "repetition_penalty"), GENERATION),
    # data
    **dict.fromkeys(("dataset", "eval_dataset"), DATASETS),
    **dict.fromkeys(("dataset_dir", "media_dir", "tokenized_path", "data_shared_file_system"), READING),
    **dict.fromkeys(("template", "default_system", "tool_format", "enable_thinking", "preserve_thinking", "train_on_prompt",
                     "mask_history", "ignore_pad_token_for_loss"), CHAT),
    "cutoff_len": To("data.seq_len", whole, default=2048),
    "packing": JOINT,
    "neat_packing": JOINT,
    "max_samples": differs("a sample is no row of tokens: --set data.max_rows=N limits an epoch to N rows", off=never),
    **dict.fromkeys(("mix_strategy", "interleave_probs"), differs("data.train takes paths with weights")),
    **dict.fromkeys(("image_*", "video_*", "audio_*", "use_audio_in_video", "crop_to_patches"), MULTIMODAL),
    **dict.fromkeys(("streaming", "buffer_size", "overwrite_cache", "preprocessing_batch_size", "preprocessing_num_workers",
                     "remove_unused_columns", "group_by_length", "disable_shuffling"), READING),
    **dict.fromkeys(("dataloader_*",), LOADING),
    # batch, length, layout
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs", "deepspeed", "fsdp"),
                    JOINT),
    "auto_find_batch_size": not_built("a search for the batch size"),
    "fsdp_config": not_needed("ZeRO shards every leaf"),
    "disable_gradient_checkpointing": To("layout.remat", lambda value: "none" if flag(value) else "full", default=False),
    "gradient_checkpointing": not_needed("LLaMA-Factory reads disable_gradient_checkpointing"),
    # optimizer, schedule
    "learning_rate": To("optim.lr", number, default=5e-5),
    "max_grad_norm": To("optim.clip_norm", number, default=1.0),
    **dict.fromkeys(("optim", "use_muon", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), JOINT),
    **dict.fromkeys(("use_galore", "galore_*", "use_apollo", "apollo_*", "use_badam", "badam_*", "use_adam_mini", "optim_args",
                     "optim_target_modules"), OTHER_OPTIMIZER),
    **dict.fromkeys(("lr_scheduler_type", "warmup_ratio", "warmup_steps", "lr_scheduler_kwargs"), JOINT),
    "early_stopping_steps": not_built("early stopping"),
    # numbers
    **dict.fromkeys(("bf16", "fp16", "pure_bf16"), JOINT),
    **dict.fromkeys(("fp8", "fp8_*"), FP8),
    "tf32": not_needed("precision.matmul is the chip's default"),
    "fp16_opt_level": not_needed("precision.compute says it"),
    "half_precision_backend": not_needed("precision.compute says it"),
    "bf16_full_eval": not_needed("evaluation runs in precision.compute"),
    "fp16_full_eval": not_needed("evaluation runs in precision.compute"),
    # run, evaluation, checkpoints, log
    "output_dir": To("train.out", text),
    "overwrite_output_dir": differs("nothing is overwritten: a run takes the next free folder name"),
    "seed": To("train.seed", whole, default=42),
    "data_seed": not_needed("train.seed seeds everything"),
    "full_determinism": KERNELS,
    "logging_steps": To("train.log_every", whole),
    **dict.fromkeys(("logging_strategy", "logging_first_step", "logging_dir", "run_name", "plot_loss", "disable_tqdm", "log_level",
                     "log_level_replica", "logging_nan_inf_filter", "include_num_input_tokens_seen", "include_tokens_per_second",
                     "include_effective_tokens_per_second", "print_param_status", "compute_accuracy"), LOGGING),
    "report_to": To("record.tensorboard", _reports),
    **dict.fromkeys(("use_swanlab", "swanlab_*"), differs("a run writes TensorBoard events and metrics.jsonl")),
    **dict.fromkeys(("enable_torch_profiler", "profiler_*", "profile_modules"), PROFILE),
    **dict.fromkeys(("save_strategy", "save_steps"), JOINT),
    "save_total_limit": To("checkpoint.keep", whole),
    "save_only_model": differs("a checkpoint has all state; the last one serves as weights too"),
    "save_safetensors": EXPORT,
    "load_best_model_at_end": differs("checkpoint.keep_best=N keeps the best"),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), not_needed("the best has the lowest validation loss")),
    "resume_from_checkpoint": differs("checkpoints of the Trainer are not read; --resume takes a run folder"),
    **dict.fromkeys(("do_eval", "eval_strategy", "evaluation_strategy", "eval_steps", "val_size"), JOINT),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_accumulation_steps", "eval_delay", "eval_on_start", "eval_num_beams",
                     "eval_on_each_dataset", "prediction_loss_only"), not_needed("an evaluation takes train.eval_rows rows")),
    **dict.fromkeys(("ddp_*", "local_rank", "use_cpu", "no_cuda", "ray_*", "master_addr", "master_port", "accelerator_config",
                     "average_tokens_across_devices", "torch_empty_cache_steps", "label_names"), RUNNING),
}
