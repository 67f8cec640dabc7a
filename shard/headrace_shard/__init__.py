"""One rank of a model: executes the steps a router sends. Never imports the web."""
