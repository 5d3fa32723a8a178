"""Measurements side by side: ratios within one run, repeats interleaved, medians with their spread."""
