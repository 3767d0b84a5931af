"""The policy with the least gradient error whose training step fits a memory budget.

Placing bits is a knapsack with a few choices a layer. Solved exactly first, on measured errors of single
layers; then an Optuna study looks around the solution for what only joint measurement shows.
"""
