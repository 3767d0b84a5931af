"""The study: an Optuna search around the exact solution, which measures what is not additive."""
