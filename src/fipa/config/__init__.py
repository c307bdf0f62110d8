"""Experiments as TOML files: what they may say, checked before anything runs."""
