"""A study that several processes work on: its storage, its trials among the workers, and lost connections."""
