"""The user's model, batch and loss: read them, run them, and restore their state."""
