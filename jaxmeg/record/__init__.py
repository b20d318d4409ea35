"""The run record: what a run writes down about itself, and how it reads that off the devices without stalling them."""
