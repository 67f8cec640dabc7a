"""Run by hand. `python -m bench` measures a server over HTTP and imports nothing of headrace; `simulate` and
`scheduler` beside it run headrace's scheduler without a server.
"""
