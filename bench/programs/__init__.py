"""Programs from libraries: each is planned, run on 8 host devices, compared with its unsharded step and with XLA."""
