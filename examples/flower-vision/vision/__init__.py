"""Image classification with FIPA on Flower."""
