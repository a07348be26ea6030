"""Triton kernels of labkit, each beside its plain-torch reference; nothing here imports labkit."""
