"""The command line. A package of its own, because importing crosshead would delay `crosshead --help` by seconds."""
