"""Flags and the one line that answers a wrong one."""


class UserError(Exception):
    """What a user did that cannot work: one line naming the thing, its value and the remedy. Scripts exit with code 2."""
