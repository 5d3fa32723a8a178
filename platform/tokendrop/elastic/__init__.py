"""Runs whose workers follow their plan within one run of Ray Train."""
