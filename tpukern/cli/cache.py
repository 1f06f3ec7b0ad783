"""``tpukern cache``: where compiled kernels are kept, how much there is, and clearing it."""

import click

from tpukern.cli.output import Output, json_option, mebibytes


@click.group("cache")
def cache_command():
    pass
