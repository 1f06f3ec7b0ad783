"""A group of commands: it suggests one for a name that is none, and prints its help if none is named."""

import click

from tpukern.errors import did_you_mean


class Group(click.Group):
    """A click group whose words for an unknown command are the same in every click release."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            hint = did_you_mean(name, known)
            ctx.fail(f"no command {name!r}; expected one of {known}." + (f" {hint}" if hint else ""))
        return super().resolve_command(ctx, args)


def print_help(ctx: click.Context) -> None:
    """Prints the group's help if no command of it was named: what its callback does."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
