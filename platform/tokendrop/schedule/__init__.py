"""Arithmetic over steps, known before a run starts; the standard library alone."""
