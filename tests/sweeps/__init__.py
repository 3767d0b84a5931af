"""Sweeps: everything that PyTorch and transformers have, plain beside converted. `python -m tests.sweeps`."""
