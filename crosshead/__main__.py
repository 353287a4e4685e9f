"""Runs the command line with `python -m crosshead`."""

from crosshead_command.main import main

main()
