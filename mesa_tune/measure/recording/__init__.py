"""Recording a training step inside a script, for a model file."""
