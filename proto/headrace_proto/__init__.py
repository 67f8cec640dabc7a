"""What two headrace processes must agree on: messages, settings, log lines, child processes."""

__version__ = "0.1.0"
