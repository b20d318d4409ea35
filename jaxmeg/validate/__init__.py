"""Every rule of a config, one line of value, rule and fix for each that is violated."""
