"""An experiment of fipa on Flower."""
