"""From other stacks' configurations to ours: DeepSpeed, Megatron-LM, LLaMA-Factory. One module a format, tables as data."""
