"""Policies: which layer stores its activations how; settings, rules, policy.txt."""

from mesa_tune.policy.policy import Policy

__all__ = ["Policy"]
