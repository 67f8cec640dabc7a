"""The launcher: resolves the model, starts shards and router, supervises them, drains."""
