"""`python -m millrace` is the `millrace` command."""

from millrace.cli.main import command

if __name__ == "__main__":
    command()
