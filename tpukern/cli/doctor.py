import click


@click.command("doctor")
def doctor_command():
    pass
