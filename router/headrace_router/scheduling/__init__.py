"""Who runs, how many tokens of each, in which blocks. Pure: no await, no clock, no device, no web."""
