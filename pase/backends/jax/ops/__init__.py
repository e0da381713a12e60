"""Ops at run time that both lowerings share: attention, convolutions, Fourier transforms; and equations of a jaxpr."""
