"""An HTTP benchmark, run by hand: `python -m bench --help`. Imports nothing of headrace."""
