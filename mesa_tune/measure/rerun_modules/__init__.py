"""Modules that could run again in backward (`store: recompute`): which, and what they cost."""
