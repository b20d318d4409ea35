"""Megatron-LM's arguments one by one, as of core 0.19 (2026): each with a counterpart, a reason, or `JOINT`.

Data only; what several arguments decide together is in `megatron`. Reference: megatron/training/arguments.py and the
dataclasses of megatron/training/config, whose names give most arguments.
"""

from __future__ import annotations

from jaxmeg.migrate.core import (
    JOINT,
    Reason,
    Table,
    To,
    always,
    choice,
    differs,
    equals,
    is_one,
    never,
    not_built,
    not_needed,
    number,
    text,
    whole,
)

LAUNCHER = not_needed("the launcher's; see the section distributed for several processes")
FUSIONS = not_needed("XLA and cuDNN choose kernels and fusions")
SCHEDULING = not_needed("XLA schedules the collectives of the compiled step")
LOGGING = not_needed("step time, throughput, memory and norms are in the log and in metrics.jsonl")
CHECKPOINTS = not_needed("checkpoints are written by all processes and open on any layout")
DATA_READING = not_needed("rows are read by index and prefetched")
FINDING_FAULTS = not_needed("a gradient that is not finite skips its update, and a few in a row stop the run")
OFFLOAD = not_built("offload to the host")
FP8 = differs("FP8 has one scale a tensor, taken anew in each product: --set precision.fp8=true")
MOE = not_built("mixture of experts")
CONTEXT = not_built("context parallelism; mesh.cp stays 1", off=equals(1))
EXPERTS = not_built("expert parallelism; mesh.ep stays 1", off=equals(1))
ROPE_SCALING = not_built("scaling of rotary frequencies")
UNEVEN = not_needed("layers are cut evenly, and embedding and head are shared by all stages")
INIT = differs("initial weights have a standard deviation of 1 / sqrt(fan-in)")
OTHER_MODEL = not_built("this kind of model")
FIXED_LOSS_SCALE = differs("the loss scale is dynamic")

MODEL = (
    "--num-layers", "--hidden-size", "--num-attention-heads", "--ffn-hidden-size", "--group-query-attention", "--num-query-groups",
    "--kv-channels", "--max-position-embeddings", "--normalization", "--norm-epsilon", "--layernorm-epsilon",
    "--swiglu", "--squared-relu", "--quick-geglu",
    "--position-embedding-type", "--use-rotary-position-embeddings", "--rotary-base",
    "--untie-embeddings-and-output-weights", "--disable-bias-linear", "--add-qkv-bias", "--qk-layernorm", "--vocab-size",
)
"""What makes a model's shape; read together, and only with the first three."""

SHAPE = MODEL[:3]
SEVERAL_VALUES = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")

TABLE: Table = {
    # mesh
    **dict.fromkeys(("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage",
                     "--num-virtual-stages-per-pipeline-rank", "--num-distributed-optimizer-instances", "--context-parallel-size"), JOINT),
    "--expert-model-parallel-size": EXPERTS,
    "--expert-tensor-parallel-size": EXPERTS,
    "--sequence-parallel": not_needed("with mesh.tp the sequence is always sharded between blocks"),
    "--microbatch-group-size-per-virtual-pipeline-stage": not_needed("the schedule takes pp microbatches at a time"),
    **dict.fromkeys(("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--pipeline-model-parallel-layout",
                     "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"), UNEVEN),
    **dict.fromkeys(("--hierarchical-context-parallel-sizes", "--hybrid-context-parallel", "--cp-comm-type"),
                    not_needed("it belongs to context parallelism")),
    "--use-tp-pp-dp-mapping": not_needed("tp neighbours sit on the fastest links, stages are outermost"),
    # ZeRO
    **dict.fromkeys(("--use-distributed-optimizer", "--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2",
                     "--data-parallel-sharding-strategy", "--grad-reduce-in-bf16"), JOINT),
    "--outer-dp-sharding-strategy": differs("state is whole in each of the mesh.rep groups", off=equals("no_shard")),
    "--accumulate-allreduce-grads-in-fp32": not_needed("gradients add up in fp32"),
    "--main-grads-dtype": differs("gradients add up in fp32", off=equals("fp32")),
    "--main-params-dtype": differs("masters are fp32", off=equals("fp32")),
    "--exp-avg-dtype": differs("moments are fp32", off=equals("fp32")),
    "--exp-avg-sq-dtype": differs("moments are fp32", off=equals("fp32")),
    "--use-precision-aware-optimizer": not_needed("masters, moments and gradient sums are fp32"),
    **dict.fromkeys(("--optimizer-cpu-offload", "--cpu-offloading-num-layers", "--fine-grained-activation-offloading",
                     "--offload-modules", "--optimizer-offload-fraction", "--use-torch-optimizer-for-cpu-offload", "--no-pin-cpu-*"),
                     OFFLOAD),
    # batch, length
    **dict.fromkeys(("--micro-batch-size", "--global-batch-size", "--train-iters", "--train-samples"), JOINT),
    "--rampup-batch-size": not_built("a batch that grows; data.global_batch holds from the start"),
    "--step-batch-size-schedule": not_built("a batch that grows; data.global_batch holds from the start"),
    "--decrease-batch-size-if-needed": not_needed("a batch that does not fit the mesh is refused"),
    "--exit-interval": differs("a run ends after train.steps"),
    "--exit-duration-in-mins": differs("a run ends after train.steps, or when it is told to stop"),
    "--exit-signal-handler": not_needed("a run that is told to stop saves first"),
    "--iterations-to-skip": differs("every update is trained"),
    "--yaml-cfg": differs("arguments are read from shell text", off=never),
    "--skip-train": differs("evaluation alone has no command"),
    # model
    **dict.fromkeys(MODEL, JOINT),
    "--seq-length": To("data.seq_len", whole),
    "--encoder-seq-length": To("data.seq_len", whole),
    "--hidden-dropout": To("train.dropout", number, default=0.1),
    "--attention-dropout": JOINT,
    "--apply-layernorm-1p": not_needed("the same norm with its scale stored as 1 + weight; norms do not decay"),
    "--openai-gelu": not_needed("gelu is its tanh form"),
    "--no-position-embedding": not_needed("with rope there is no position table"),
    "--rotary-percent": not_built("rotary embedding of a part of the head", off=is_one),
    "--rotary-interleaved": not_built("interleaved rotary pairs"),
    **dict.fromkeys(("--use-rope-scaling", "--rope-scaling-factor", "--rotary-seq-len-interpolation-factor", "--rotary-scaling-factor",
                     "--yarn-*", "--no-rope-freq"), ROPE_SCALING),
    "--rope-type": not_built("yarn", off=equals("rope")),
    "--make-vocab-size-divisible-by": not_needed("the vocabulary is padded to what the mesh needs, and padding is masked"),
    "--padded-vocab-size": not_needed("the vocabulary is padded to what the mesh needs, and padding is masked"),
    "--no-pad-vocab-size": not_needed("the vocabulary is padded to what the mesh needs, and padding is masked"),
    **dict.fromkeys(("--init-method-std", "--embedding-init-method-std", "--init-method-xavier-uniform", "--use-mup", "--mup-*"), INIT),
    "--attention-output-gate": OTHER_MODEL,
    "--softmax-scale": OTHER_MODEL,
    "--freeze-all-layers": not_built("frozen weights"),
    "--qk-l2-norm": OTHER_MODEL,
    "--qk-clip": OTHER_MODEL,
    "--softmax-type": not_built("attention sinks", off=equals("vanilla")),
    "--window-size": not_built("sliding windows"),
    "--window-attn-skip-freq": not_built("sliding windows"),
    "--glu-linear-offset": OTHER_MODEL,
    "--activation-func-clamp-value": OTHER_MODEL,
    "--apply-residual-connection-post-layernorm": OTHER_MODEL,
    "--apply-query-key-layer-scaling": not_needed("softmax is fp32"),
    "--attention-softmax-in-fp32": not_needed("softmax is fp32"),
    "--fp32-residual-connection": differs("the residual stream is in precision.compute"),
    "--multi-latent-attention": OTHER_MODEL,
    **dict.fromkeys(("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", "--mscale*"),
                    OTHER_MODEL),
    **dict.fromkeys(("--mtp-*", "--mamba-*", "--hybrid-*", "--is-hybrid-model", "--linear-*", "--experimental-attention-variant",
                     "--heterogeneous-layers-*", "--bert-*", "--vision-*", "--biencoder-*", "--ict-*", "--mhc-*",
                     "--enable-mhc-connections", "--encoder-num-layers", "--decoder-num-layers", "--decoder-seq-length", "--spec",
                     "--enable-gpt-oss", "--retro-*", "--dsa-*"), OTHER_MODEL),
    **dict.fromkeys(("--num-experts", "--moe-*"), MOE),
    # learning rate, optimizer
    **dict.fromkeys(("--lr", "--min-lr", "--lr-decay-style", "--lr-decay-iters", "--lr-decay-samples", "--lr-warmup-iters",
                     "--lr-warmup-samples", "--lr-warmup-fraction", "--lr-wsd-decay-style", "--lr-wsd-decay-iters",
                     "--lr-wsd-decay-samples"), JOINT),
    "--lr-warmup-init": differs("the warm-up starts at 0"),
    "--decoupled-lr": differs("one learning rate for all leaves"),
    "--decoupled-min-lr": differs("one learning rate for all leaves"),
    **dict.fromkeys(("--optimizer", "--weight-decay", "--adam-beta1", "--adam-beta2", "--adam-eps", "--lion-beta1", "--lion-beta2",
                     "--sgd-momentum", "--muon-momentum", "--muon-num-ns-steps"), JOINT),
    "--muon-*": differs("Muon has momentum and optim.newton_schulz_steps, nothing else to set"),
    "--no-decoupled-weight-decay": differs("weight decay is decoupled"),
    "--apply-wd-to-qk-layernorm": differs("norms do not decay"),
    "--no-weight-decay-cond-type": differs("norms and biases do not decay"),
    **dict.fromkeys(("--start-weight-decay", "--end-weight-decay"), differs("weight decay does not change in a run")),
    "--weight-decay-incr-style": differs("weight decay does not change in a run", off=equals("constant")),
    "--clip-grad": To("optim.clip_norm", number, default=1.0),
    "--override-opt-param-scheduler": not_needed("a resumed run takes the schedule of its config, and says what changed"),
    "--override-opt_param-scheduler": not_needed("a resumed run takes the schedule of its config, and says what changed"),
    "--use-checkpoint-opt-param-scheduler": not_needed("a resumed run takes the schedule of its config, and says what changed"),
    # numbers
    **dict.fromkeys(("--bf16", "--fp16", "--initial-loss-scale", "--loss-scale-window"), JOINT),
    "--loss-scale": FIXED_LOSS_SCALE,
    "--min-loss-scale": not_needed("the scale falls to 1, then the run stops after optim.max_skipped_updates"),
    "--hysteresis": not_needed("the loss scale halves at every overflow"),
    **dict.fromkeys(("--fp8-*", "--fp4-*", "--fp8", "--fp4", "--first-last-layers-bf16", "--num-layers-at-*-in-bf16",
                     "--keep-fp8-transpose-cache"), FP8),
    "--fp16-lm-cross-entropy": differs("the loss is fp32"),
    "--output-logit-dtype": not_needed("logits and loss are fp32"),
    "--calculate-per-token-loss": not_needed("the loss is a mean over all trained tokens of the update"),
    # memory
    "--recompute-activations": To("layout.remat", always("selective")),
    "--recompute-granularity": To("layout.remat", choice({"full": "full", "selective": "selective"}, "use full or selective")),
    "--checkpoint-activations": To("layout.remat", always("full")),
    **dict.fromkeys(("--recompute-method", "--recompute-num-layers", "--recompute-modules", "--distribute-saved-activations"),
                    not_needed("layout.remat holds for every layer")),
    # data
    **dict.fromkeys(("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--split", "--mock-data",
                     "--reset-position-ids", "--reset-attention-mask", "--dataloader-inter-document-masking", "--eod-mask-loss",
                     "--tokenizer-type", "--tokenizer-model"), JOINT),
    **dict.fromkeys(("--vocab-file", "--merge-file"), differs("a tokenizer is one tokenizer.json; a .bin holds token ids")),
    **dict.fromkeys(("--data-args-path", "--per-split-data-args-path", "--per-dataset-sequences-path"),
                    differs("data.train takes paths with weights")),
    **dict.fromkeys(("--tokenizer-*", "--tiktoken-*", "--vocab-extra-ids", "--null-tokenizer-*", "--trust-remote-code", "--chat-template"),
                    not_needed("a .bin holds token ids")),
    "--dataloader-type": differs("epochs are shuffled by train.seed, pass after pass", off=equals("single", "cyclic")),
    **dict.fromkeys(("--num-workers", "--data-cache-path", "--no-mmap-bin-files", "--num-dataset-builder-threads",
                     "--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap", "--object-storage-cache-path",
                     "--no-create-attention-mask-in-dataloader", "--mid-level-dataset-surplus", "--data-sharding"), DATA_READING),
    "--fim-*": not_built("fill in the middle"),
    "--sft": not_built("supervised fine-tuning"),
    "--sft-*": not_built("supervised fine-tuning"),
    # run, evaluation, checkpoints, log
    "--seed": To("train.seed", whole, default=1234),
    "--data-parallel-random-init": differs("replicas start equal"),
    "--save": To("train.out", text),
    "--save-interval": To("checkpoint.every", whole),
    "--persistent-save-interval": To("checkpoint.every", whole),
    "--load": JOINT,
    "--pretrained-checkpoint": differs("Megatron's checkpoints are not read; checkpoint.init_from takes a run folder"),
    "--finetune": differs("checkpoint.init_from takes weights from a run folder"),
    "--save-retain-interval": differs("checkpoint.keep says how many stay"),
    "--eval-iters": JOINT,
    "--eval-interval": To("train.eval_every", whole, default=0),
    "--start-eval-at-iter": differs("evaluations are train.eval_every updates apart from the start"),
    "--full-validation": To("train.eval_rows", always(0)),
    "--eval-global-batch-size": not_needed("an evaluation takes train.eval_rows rows in batches of data.global_batch"),
    "--eval-micro-batch-size": not_needed("an evaluation takes train.eval_rows rows in batches of data.global_batch"),
    "--log-interval": To("train.log_every", whole, default=100),
    "--tensorboard-dir": To("record.tensorboard", always(True), "events are written into the run folder"),
    **dict.fromkeys(("--wandb-*", "--one-logger-*", "--no-one-logger", "--otel-*", "--app-tag-run-*"),
                     differs("a run writes TensorBoard events and metrics.jsonl")),
    **dict.fromkeys(("--profile", "--profile-step-start", "--profile-step-end"), JOINT),
    **dict.fromkeys(("--no-load-optim", "--no-load-rng", "--no-save-optim", "--no-save-rng", "--ckpt-*", "--no-ckpt-*", "--dist-ckpt-*",
                     "--use-dist-ckpt", "--async-*", "--use-persistent-ckpt-worker", "--auto-detect-ckpt-format", "--non-persistent-*",
                     "--use-checkpoint-args", "--exit-on-missing-checkpoint", "--use-mp-args-from-checkpoint-args",
                     "--no-use-tokenizer-model-from-checkpoint-args", "--override-ckpt-iteration", "--distrib-optim-*", "--enable-msc",
                     "--disable-msc"), CHECKPOINTS),
    # how it runs
    **dict.fromkeys(("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-*", "--standalone",
                     "--max-restarts", "--local-rank", "--local-ranks-filter", "--distributed-*", "--lazy-mpu-init",
                     "--nccl-communicator-config-path", "--disable-gloo-process-groups", "--no-use-gloo-process-groups",
                     "--high-priority-stream-groups", "--flight-recorder-*", "--use-sharp", "--sharp-*"), LAUNCHER),
    **dict.fromkeys(("--overlap-*", "--no-overlap-*", "--tp-comm-*", "--no-tp-comm-*", "--ddp-*", "--no-align-*",
                     "--no-async-*", "--delay-wgrad-compute", "--defer-embedding-wgrad-compute", "--wgrad-deferral-limit", "--use-nccl-ub",
                     "--fsdp-*", "--suggested-communication-unit-size", "--use-ring-exchange-p2p", "--create-all-gather-group",
                     "--no-gradient-reduce-div-fusion", "--torch-fsdp2-no-reshard-after-forward", "--megatron-fsdp-*",
                     "--init-model-with-meta-device"), SCHEDULING),
    **dict.fromkeys(("--no-*-fusion", "--*-fusion", "--cross-entropy-fusion-impl", "--no-persist-layer-norm", "--transformer-impl",
                     "--attention-backend", "--use-flash-attn", "--flash-attention-version", "--use-mcore-models", "--use-legacy-models",
                     "--cuda-graph-*", "--enable-cuda-graph", "--external-cuda-graph", "--te-*", "--disable-bf16-reduced-precision-matmul",
                     "--deterministic-mode", "--batch-invariant-mode", "--disable-jit-fuser", "--use-kitchen*", "--use-te-*",
                     "--optimizer-cuda-graph", "--use-cpu-initialization", "--no-initialization"), FUSIONS),
    **dict.fromkeys(("--log-*", "--no-log-*", "--timing-*", "--tensorboard-*", "--logging-level", "--no-barrier-with-level-1-timing",
                     "--profile-ranks", "--use-pytorch-profiler", "--pytorch-profiler-*", "--record-*", "--memory-snapshot-path",
                     "--nvtx-ranges", "--config-logger-dir", "--result-rejected-tracker-filename"), LOGGING),
    **dict.fromkeys(("--check-*", "--no-check-*", "--rerun-*", "--error-injection-*", "--enable-ft-package", "--calc-ft-timeouts",
                     "--ft-*", "--inprocess-*", "--straggler-*"), FINDING_FAULTS),
    **dict.fromkeys(("--manual-gc", "--manual-gc-*", "--no-manual-gc-*", "--empty-unused-memory-level", "--train-sync-interval",
                     "--adlr-autoresume*"), not_needed("a detail of Megatron's loop")),
    **dict.fromkeys(("--inference-*", "--rl-*", "--grpo-*", "--perform-rl-step", "--max-tokens-to-oom"),
                    Reason("not built yet: inference and reinforcement learning")),
}
