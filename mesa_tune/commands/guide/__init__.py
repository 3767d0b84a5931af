"""What to do next: advice on a profile, and the next command of a run."""
