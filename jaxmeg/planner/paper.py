"""How papers count: 2 + 2 + 12 bytes a parameter, and what ZeRO and tensor parallelism send. For comparison with `planner.memory`.

Mixed-precision Adam there: 16-bit parameters and gradients, and 12 bytes of fp32 masters and two moments. Activations are not
counted. References: Rajbhandari et al. 2020 (ZeRO), Shoeybi et al. 2019 (Megatron-LM).
"""

from __future__ import annotations

from fractions import Fraction

WEIGHTS, GRADIENTS, OPTIMIZER = 2, 2, 12


def zero_bytes(parameters: int, stage: int, ranks: int) -> Fraction:
    """Bytes of parameters, gradients and optimizer state on one of `ranks` GPUs."""
    parts = ((OPTIMIZER, 1), (GRADIENTS, 2), (WEIGHTS, 3))  # bytes, the stage that cuts them
    return parameters * sum((Fraction(size, ranks if stage >= first else 1) for size, first in parts), Fraction(0))


def zero_limit(stage: int) -> Fraction:
    """How many times less memory a stage can need than none, with ever more GPUs: 4 at stage 1, 8 at stage 2; stage 3 has no limit."""
    if stage >= 3:
        raise ValueError(f"stage={stage} has no limit: its memory falls with the number of GPUs")
    total, kept = WEIGHTS + GRADIENTS + OPTIMIZER, (WEIGHTS + GRADIENTS + OPTIMIZER, WEIGHTS + GRADIENTS, WEIGHTS)[stage]
    return Fraction(total, kept)


def zero_sent(parameters: int, stage: int) -> int:
    """Elements that each GPU sends a step: gradients reduced and parameters gathered (2 x), and gathered again for the backward
    pass at stage 3 (3 x)."""
    return (3 if stage == 3 else 2) * parameters


def largest_model(memory_bytes: float, ranks: int) -> int:
    """Parameters whose state ZeRO 3 alone fits on so many GPUs, activations not counted."""
    return int(memory_bytes * ranks / (WEIGHTS + GRADIENTS + OPTIMIZER))


def tensor_parallel_reductions(num_layers: int, recomputed: bool = False) -> int:
    """All-reduces of a microbatch: two a layer forward and two backward, and two more where a layer is computed again. With the
    sequence sharded each is a gather and a scatter of the same bytes."""
    return num_layers * (6 if recomputed else 4)
