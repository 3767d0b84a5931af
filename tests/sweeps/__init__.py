"""Tests of the sweeps over operators, modules and architectures."""
