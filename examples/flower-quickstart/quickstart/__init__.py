"""A plain Flower app with PyTorch."""
