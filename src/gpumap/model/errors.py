"""What ends the command: one line for the user, and an exit code."""


class UsageError(Exception):
    """A flag or file that cannot be honoured: exit code 2. The message names it."""


class FatalError(Exception):
    """Nothing that the user wrote, but the work cannot be done: exit code 1."""
