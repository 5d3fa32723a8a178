"""The training loop and what it needs; torch, no Ray."""
