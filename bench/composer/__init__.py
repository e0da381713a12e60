"""Programs as people write them, composed from patterns and compared with the step that is not sharded."""
