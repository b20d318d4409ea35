"""Pipeline parallelism: schedules are tables, one executor runs them."""
