"""One decoder; model families are data (`arch.PRESETS`)."""
