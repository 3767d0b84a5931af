"""A workload around what a training script has at hand: a model instance, batches, an optimizer."""
