"""The command line: flags, commands, exit codes."""
