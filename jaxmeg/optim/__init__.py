"""Optimizers by name, as optax transforms; learning-rate schedules counted in updates; which leaves decay."""
