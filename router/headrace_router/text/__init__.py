"""Strings to token ids and back. Pure: no web, no scheduling, no await."""
