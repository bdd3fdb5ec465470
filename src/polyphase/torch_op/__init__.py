"""The layer as PyTorch sees it: operators, derivatives, checked arguments, memory formats, the portable path."""
