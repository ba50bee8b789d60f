"""Hugging Face transformers: proposers inside ``model.generate``."""
