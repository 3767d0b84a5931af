"""Memory of a training step: what is alive when, traced, and predicted under any policy."""
