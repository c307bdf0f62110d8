"""Digits on Flower: FedAvg, and FIPA in a shared basis."""
