"""Which layout, will it fit, how fast, and why: answers from closed formulas, before a GPU is touched."""
