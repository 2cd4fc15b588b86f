"""Pipeline parallelism: schedules, stages, and the engine that runs them."""
