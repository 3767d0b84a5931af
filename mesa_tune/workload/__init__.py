"""The user's model, batch and loss: read, run, and put back as they were."""
