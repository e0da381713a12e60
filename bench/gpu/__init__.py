"""Benches for one GPU, which together take ten minutes on an H100.

    python -m bench gpu.jax_steps --machine h100x8 --steps 5 -o jax_steps.json
    python -m bench gpu.torch_steps --machine h100x8 --steps 5 -o torch_steps.json
    python -m bench gpu.card -o card.json
    pase calibrate -o here.toml

Each row is saved when it is measured, and ``--resume`` goes on after an interruption. They run on a CPU, too, for small
models, so that they are tested where no GPU is.
"""
