"""Sweeps: all that PyTorch and transformers have, plain beside converted. `python -m benchmarks.sweeps`."""
