"""ActNN's compiled modules by name, built on PyTorch's functions and mesa-tune's quantizer."""
