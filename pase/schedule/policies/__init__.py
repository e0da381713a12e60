"""One file per policy or small family; each registers itself with `pase.schedule.registry.register`."""
