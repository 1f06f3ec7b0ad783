"""``python -m tpukern.cli``: the same command, where no console script is installed."""

from tpukern.cli.app import main

main()
