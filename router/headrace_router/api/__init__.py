"""HTTP in, HTTP out: bodies to requests, generations to answers and event streams. No scheduling."""
