"""Is this machine ready for this run? Checks in the order in which people look for the fault; `scripts/doctor.py` runs them."""
