"""Runs on Ray."""
