"""The one error that is the user's to mend. Imports nothing."""


class InputError(Exception):
    """The user's input is wrong or this machine cannot do what was asked.

    The text is one or two sentences: what is wrong, where, what is valid. It is printed
    without a traceback and the process ends with exit code 2.
    """
