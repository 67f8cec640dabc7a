"""Replays arrivals against a scheduling policy and a model of a GPU. No clock, no network, no device."""
