"""What a training step keeps, for how long, and what each way of storing it would do: measured."""
