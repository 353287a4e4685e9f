"""Learning-rate sweeps and scaling laws."""
