"""What each function computes and keeps: one file a family, named as PyTorch names the operation."""
