"""Checkpoints: canonical arrays on disk, written while training goes on, read into any layout."""
