"""The command line and the tiny model, as the tests of the command line have them."""

from tests.cli.conftest import cli, tiny_folder

__all__ = ["cli", "tiny_folder"]
