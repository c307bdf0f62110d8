"""The page that watches runs, `fipa serve`: it reads what is on disk and writes nothing.

`histories`, `plans` and `sources` read, `library` finds, `views` says what is shown, `app` serves it.
"""
