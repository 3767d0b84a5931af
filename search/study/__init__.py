"""The study: one Optuna study around the exact solution, which measures what is not additive."""
