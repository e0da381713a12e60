"""Programs from libraries, each planned, run on 8 host devices, and compared with its unsharded step and with XLA."""
