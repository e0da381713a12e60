"""What a device holds: what backward keeps, the account of a step, and its course from moment to moment."""
