"""Measure what a training step saves, for how long, and what each option to store it costs."""
