"""How one call of a function runs: planned, stored, restored, and its backward."""
