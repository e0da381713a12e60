"""Published measurements compared with predictions of each run in its own configuration, and with pase's choice."""
