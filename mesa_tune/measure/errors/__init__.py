"""Gradient errors: of one layer under one option, and of whole steps under a policy."""
