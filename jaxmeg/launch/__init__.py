"""Starting a run's processes on one host or several: which hosts and GPUs, which commands, and watching over them."""
