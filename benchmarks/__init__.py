"""Measurements of the built-in proposers, and what they are measured on and against."""
