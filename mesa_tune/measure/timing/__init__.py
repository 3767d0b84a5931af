"""The time of a training step: what each layer and each option adds."""
