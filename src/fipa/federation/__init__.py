"""Rounds on one machine: who takes part, what they do, how the server steps, and how to resume after a crash."""
