"""Run by hand. `python -m bench` measures a server over HTTP and imports nothing of headrace; `bench.simulate` and
`bench.scheduler` run headrace's scheduler without one.
"""
