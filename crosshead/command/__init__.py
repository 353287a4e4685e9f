"""The command line, as a package of its own: importing crosshead takes seconds, and `crosshead --help` must not."""
