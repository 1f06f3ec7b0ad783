"""The ``tpukern`` command.

One file a command; `app.py` holds the group, and how errors and exit statuses come out. Nothing heavier than click is
imported before a command needs it: ``tpukern --help`` loads neither jax, torch nor libtpu.
"""

from tpukern.cli.app import cli, main

__all__ = ["cli", "main"]
