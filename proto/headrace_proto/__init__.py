"""What two headrace processes must agree on: messages, settings, log lines, child processes."""

import os

# gRPC's own core reads it when it is imported, which is after this, and otherwise prints lines of its own
# about connections that close. Who looks for a fault in it sets the variable.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
