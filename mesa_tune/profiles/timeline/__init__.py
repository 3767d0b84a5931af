"""The bytes of a step, moment by moment, under any policy."""
