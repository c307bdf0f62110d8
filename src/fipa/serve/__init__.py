"""The page that watches runs: `fipa serve`."""
