"""Corpora: where they lie, and the documents in their files."""
