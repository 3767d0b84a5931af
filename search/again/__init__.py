"""Solving the plan of a run again while its model trains."""
