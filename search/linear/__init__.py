"""The linear side of the solver: a space as sparse rows, and calls of HiGHS."""
