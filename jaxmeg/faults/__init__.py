"""Faults that are tried on real runs: what breaks, what the user sees, what is lost, and whether the run goes on to the bit."""
