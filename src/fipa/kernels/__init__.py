"""Small CNNs and tanh networks on CPUs, faster than torch runs them; needs numba."""
