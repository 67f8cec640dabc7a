"""The only gRPC in the router."""
