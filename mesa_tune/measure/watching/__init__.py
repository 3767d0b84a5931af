"""Observing a training step inside a script that knows nothing of it."""
