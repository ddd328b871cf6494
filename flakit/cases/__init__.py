"""The casebook: real failures, one module each, the faulty and the right computation side by side.

Every module tells the story as it was told and as it measures, and has a `law` that predicts the onset from the
parameters, `reproduce()`, which measures the numbers of the story again, and `at(**knobs)` for one setting. `registry`
lists them, `flakit cases` runs them. A fault is written here and nowhere else.
"""
