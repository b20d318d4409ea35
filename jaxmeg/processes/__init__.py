"""Several processes as one run: how they find each other, what they find out together, how they stop."""
