"""Policies: how each layer stores its activations. Settings, rules, and the file policy.txt."""

from mesa_tune.policy.policy import Policy

__all__ = ["Policy"]
