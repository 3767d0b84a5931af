"""ActNN's compiled modules by their names, over PyTorch's functions and our quantizer."""
