"""Transformers, each readable alone."""
