"""Run by hand: `python -m bench` measures a server over HTTP and imports nothing of headrace; `python -m
bench.simulate` replays arrivals against headrace's scheduler and imports that alone.
"""
