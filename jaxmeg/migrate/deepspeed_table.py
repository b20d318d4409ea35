"""DeepSpeed's configuration key by key (https://www.deepspeed.ai/docs/config-json, as of 2026): data only.

A section with an entry of its own is taken whole; else its keys are looked at one by one. What several keys decide
together is in `deepspeed`.
"""

from __future__ import annotations

from typing import Any

from jaxmeg.migrate.core import JOINT, Table, To, always, differs, equals, flag, never, not_built, not_needed, number, whole

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OFFLOAD = not_built("offload to the host; state stays on the devices, sharded by ZeRO")
SCHEDULING = not_needed("XLA schedules the collectives of the compiled step")
LOGGING = not_needed("step time, throughput and memory are in the log and in metrics.jsonl")
KEPT_FP32 = differs("masters, moments and gradient sums are always fp32")
QUANTISED = not_built("quantised communication; gradients travel in precision.reduce, weights in precision.compute")
REMAT = To("layout.remat", always("full"), "DeepSpeed recomputes where the model asks for it, a run here in every layer")
TP_RULES = differs("which dims are cut is decided by layout.rules")


def _stage_interval(value: Any) -> str:
    return "full" if whole(value) > 0 else "none"


TABLE: Table = {
    **dict.fromkeys(BATCH, JOINT),
    "managed_gradient_accumulation": not_needed("an update ends after the last microbatch"),
    "elasticity": differs("the batch is data.global_batch on any number of devices"),
    # ZeRO and mesh
    "zero_optimization.stage": To("layout.zero", whole, default=0),
    "zero_optimization.zero_hpz_partition_size": JOINT,
    "zero_optimization.mics_shard_size": JOINT,
    **{f"zero_optimization.{name}": OFFLOAD for name in
       ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params", "cpu_offload_param", "zenflow")},
    **{f"zero_optimization.{name}": QUANTISED for name in
       ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "zeropp_loco_param")},
    **{f"zero_optimization.{name}": SCHEDULING for name in
       ("overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
        "allgather_bucket_size", "use_multi_rank_bucket_allreduce", "round_robin_gradients", "sub_group_size",
        "stage3_prefetch_bucket_size", "prefetch_bucket_size", "stage3_param_persistence_threshold", "param_persistence_threshold",
        "stage3_model_persistence_threshold", "model_persistence_threshold", "stage3_max_live_parameters", "max_live_parameters",
        "stage3_max_reuse_distance", "max_reuse_distance", "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "mics_hierarchical_params_gather",
        "memory_efficient_linear", "override_module_apply", "leaf_module", "fast_sharding_for_leaf_module")},
    **{f"zero_optimization.{name}": not_needed("weights and state are saved in one layout-free order") for name in
       ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save", "elastic_checkpoint",
        "load_from_fp32_weights", "pipeline_loading_checkpoint")},
    **{f"zero_optimization.{name}": not_needed("a check or detail of DeepSpeed's own") for name in
       ("ignore_unused_parameters", "legacy_stage1", "grad_hooks", "log_trace_cache_warnings", "enable_sanity_checks",
        "cpu_offload_use_pin_memory", "save_muon_momentum_buffer_in_memory")},
    "zero_allow_untested_optimizer": not_needed("every optimizer here runs with every ZeRO stage"),
    "zero_force_ds_cpu_optimizer": not_needed("it belongs to offload"),
    "aio": not_needed("it belongs to offload"),
    "pipeline.stages": JOINT,
    "pipeline.activation_checkpoint_interval": To("layout.remat", _stage_interval, "here every layer, not every n-th"),
    "pipeline.*": not_needed("layers are cut evenly over the stages"),
    **dict.fromkeys(("tensor_parallel.autotp_size", "tensor_parallel.tp_size", "tensor_parallel.tp.tp_size"), JOINT),
    "tensor_parallel.partition_config": TP_RULES,
    "tensor_parallel.preset_model": TP_RULES,
    **{f"tensor_parallel.{name}": SCHEDULING for name in
       ("tp_overlap_comm", "tp_grain_size", "tp.tp_grain_size", "dtype", "keep_module_on_host", "replace_with_kernel_inject")},
    "sequence_parallel_size": JOINT,
    "expert_parallel": not_built("mixture of experts"),
    "use_data_before_expert_parallelism": not_built("mixture of experts"),
    # numbers
    **dict.fromkeys(("fp16.enabled", "fp16.initial_scale_power", "fp16.loss_scale_window", "bf16.enabled", "bfloat16.enabled"), JOINT),
    "fp16.loss_scale": differs("a fixed loss scale; here it is always dynamic"),
    "fp16.hysteresis": not_needed("the loss scale halves at every overflow"),
    "fp16.consecutive_hysteresis": not_needed("the loss scale halves at every overflow"),
    "fp16.min_loss_scale": not_needed("the scale falls to 1, then the run stops after optim.max_skipped_updates"),
    "fp16.auto_cast": not_needed("inputs are token ids"),
    "fp16.fp16_master_weights_and_grads": KEPT_FP32,
    **{f"{section}.{name}": entry for section in ("bf16", "bfloat16") for name, entry in {
        "immediate_grad_update": SCHEDULING,
        "check_grad_overflow": not_needed("an update with a gradient that is not finite is always skipped"),
        "bf16_master_weights_and_grads": KEPT_FP32,
        "bf16_optimizer_states": KEPT_FP32}.items()},
    "amp": differs("say fp16 or bf16"),
    "torch_autocast.enabled": JOINT,
    "torch_autocast.dtype": JOINT,
    "torch_autocast.lower_precision_safe_modules": not_needed("norms, softmax and loss are fp32, products are not"),
    "communication_data_type": JOINT,
    "seq_parallel_communication_data_type": not_needed("sequence shards travel in precision.compute"),
    "data_types": not_needed("gradients add up in fp32, weights have fp32 masters"),
    "prescale_gradients": not_needed("the loss is divided by its tokens before gradients are taken"),
    "gradient_predivide_factor": not_needed("the loss is divided by its tokens before gradients are taken"),
    "gradient_allreduce_op": differs("gradients are those of the mean loss a token", off=equals("mean")),
    "sparse_gradients": not_needed("gradients of the embedding are dense"),
    "gradient_clipping": To("optim.clip_norm", number),
    # optimizer, schedule
    **{f"optimizer.params.{name}": JOINT for name in
       ("lr", "muon_lr", "betas", "eps", "weight_decay", "momentum", "adam_w_mode")},
    **{f"optimizer.params.{name}": not_needed("moments are fp32, and XLA fuses the update") for name in
       ("torch_adam", "fused", "foreach", "set_grad_none", "fp32_optimizer_states")},
    "optimizer.params.adam_lr": differs("one learning rate for all leaves, optim.lr", off=never),
    "optimizer.params.bias_correction": differs("moments are always corrected for their start", off=equals(True)),
    "optimizer.params.amsgrad": not_built("AMSGrad"),
    "optimizer.params.nesterov": differs("momentum is not Nesterov's"),
    "optimizer.params.dampening": differs("momentum is not dampened"),
    "optimizer.params.ns_method": not_needed("one Newton-Schulz iteration; see optim.newton_schulz_steps"),
    "optimizer.params.per_head_muon": not_built("Muon a head"),
    "optimizer.params.max_grad_norm": differs("DeepSpeed refuses it too: say gradient_clipping", off=never),
    "optimizer.type": JOINT,
    "optimizer.legacy_fusion": not_needed("XLA fuses the update"),
    "scheduler.type": JOINT,
    **{f"scheduler.params.{name}": JOINT for name in
       ("warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps", "cos_min_ratio")},
    "scheduler.params.warmup_min_lr": differs("the warm-up starts at 0"),
    "scheduler.params.warmup_min_ratio": differs("the warm-up starts at 0"),
    "scheduler.params.last_batch_iteration": not_needed("a resumed run knows its update"),
    # memory
    **{f"activation_checkpointing.{name}": REMAT for name in
       ("partition_activations", "contiguous_memory_optimization", "number_checkpoints")},
    "activation_checkpointing.cpu_checkpointing": OFFLOAD,
    "activation_checkpointing.synchronize_checkpoint_boundary": SCHEDULING,
    "activation_checkpointing.profile": LOGGING,
    "compile": not_needed("the whole step is compiled"),
    "graph_harvesting": not_needed("the whole step is compiled"),
    # reports, checkpoints
    "steps_per_print": To("train.log_every", whole),
    **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers", "csv_monitor"), LOGGING),
    "flops_profiler": not_needed("the log has MFU, and --profile traces updates"),
    "comms_logger": not_needed("the collectives of the compiled step can be read with jaxmeg.hlo"),
    "tensorboard.enabled": To("record.tensorboard", flag),
    "tensorboard.*": not_needed("events are written into the run folder"),
    "wandb": differs("a run writes TensorBoard events and metrics.jsonl"),
    "comet": differs("a run writes TensorBoard events and metrics.jsonl"),
    "checkpoint": not_needed("checkpoints open on any layout; see the section checkpoint"),
    "nebula": differs("a checkpoint service of another platform"),
    "datastates": differs("a checkpoint engine of DeepSpeed's own"),
    "dataloader_drop_last": not_needed("every update has data.global_batch rows"),
    # other methods
    "autotuning": not_built("a search for batch and layout"),
    "curriculum_learning": not_built("curricula"),
    "data_efficiency": not_built("curricula and token dropping"),
    "progressive_layer_drop": not_built("dropped layers"),
    "sparse_attention": not_built("sparse attention"),
    "compression_training": not_built("pruning and quantisation"),
    "quantize_training": not_built("pruning and quantisation"),
    "weight_quantization": not_built("pruning and quantisation"),
    "eigenvalue": not_built("curvature estimates"),
    "hybrid_engine": not_built("generation for reinforcement learning"),
    "disable_allgather": SCHEDULING,
    "_*": not_needed("a comment"),
}
