"""Pipeline parallelism: schedules as lists of actions, their simulation, proven bounds, and a model's best cuts."""
