"""Curvature of a model on its data; knows nothing of federation."""
