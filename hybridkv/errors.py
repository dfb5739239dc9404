"""Errors a user can mend; command lines print them as one line and exit with status 2."""


class UserError(ValueError):
    """Bad input: the message says what is wrong and what to do."""
