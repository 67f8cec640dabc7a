"""Why a launcher gives up, as a tree; `__main__` prints the message as one line.

    StartError              exit status 1: what is wrong, and what to do about it
    └── ChildFailed         a process that the service needs ended, with its last words
    Stopped                 exit status 0: a signal came while the server was starting

A usage error is `headrace_proto.settings.SettingsError`, exit status 2.
"""


class StartError(Exception):
    """The server cannot start, or cannot go on. The message is one line."""


class ChildFailed(StartError):
    """A child process ended that was not told to."""


class Stopped(Exception):
    """SIGTERM or SIGINT came before the server was up; nothing is left to do but end."""
