"""The benchmark: what a step takes, what of the chip it uses, and where the time goes."""
