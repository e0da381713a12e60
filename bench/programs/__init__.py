"""Programs taken from libraries: each is planned, run on 8 host devices, held against its unsharded step and XLA."""
