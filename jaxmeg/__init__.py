"""jaxmeg: sharded LLM training on JAX, where the parallel layout is a flag."""
