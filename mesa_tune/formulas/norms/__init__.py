"""Normalizations: by row and group, by channel, and those that models compose of other functions."""
