"""Paged attention: one protocol, one file per backend."""
