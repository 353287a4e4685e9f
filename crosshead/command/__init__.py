"""The command line. A separate package, because importing crosshead would delay `crosshead --help` by seconds."""
