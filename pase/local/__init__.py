"""Local programs: what one device computes and sends in a step of a plan. All backends run the same local program."""
