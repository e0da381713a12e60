"""Implementations that both lowerings share: attention, convolutions, Fourier transforms, and helpers for jaxprs."""
