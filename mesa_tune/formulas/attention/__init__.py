"""Attention: whole, by heads, in traced operations, and the multi-head function around it."""
