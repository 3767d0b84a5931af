"""mesa-tune in training frameworks: one module per framework, which imports it, named as the framework."""
