"""What the simulator refuses. Knows nothing else."""


class Refused(Exception):
    """The question cannot be answered; the message is one line for the user, and says what to change."""
