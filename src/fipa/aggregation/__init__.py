"""Server rules: pure functions from (theta, updates) to theta; know nothing of models or transport."""
