"""Small CNNs on CPUs, faster than torch runs them; needs numba."""
