"""A model with its kernels as one file that depends on PyTorch alone: ``python -m polyphase emit``."""
