"""Small CNNs on CPUs, several times as fast as torch runs them; needs numba."""
